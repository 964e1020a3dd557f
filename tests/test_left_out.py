"""Groups that leave the stream without a verdict on their rewards: counted as what they are, and never without end."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fake_faults import Call, Fault, missing
from fake_server import FakeServer
from loop import Scorer, loop, prompt_ids
from test_loader import GROUP, PATIENCE, running

from grpo.groups import GroupRules, NothingToLearn, group_metrics
from grpo.losses import PPOClip
from grpo.rollout import client as client_module
from grpo.rollout.episode import EpisodeLost, Session
from grpo.types import Completion, Group, Prompt


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


def rollout(call: Call) -> bool:
    """Whether a request is one of training, and no probe."""
    return not str(call.body["request_id"]).startswith("sample-")


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_server_that_refuses_every_prompt_ends_the_run_with_its_reason(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, limit=6) as trainer:
        server.add_fault(Fault("generate", status=400, when=rollout))
        with pytest.raises(NothingToLearn, match=r"6 groups in a row.*'refused': 6.*log has its reason"):
            trainer.run()
        assert sum(map(rollout, server.requests())) < (6 + 2 * 2) * 4, "a bounded number of tries"
    told = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(told) == 3, "the first few; the others say the same"
    assert all("status 400: " in line and "row/" in line for line in told)


def test_an_environment_that_never_begins_ends_the_run(server: FakeServer) -> None:
    class Lost:
        async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
            raise EpisodeLost("too_long", "no room")

    judge = GroupRules(PPOClip(), "discard", 6).judge
    with running(server, environments=Lost(), judge=judge) as loader:
        with pytest.raises(NothingToLearn, match=r"'too_long': 6"):  # noqa: PT012
            for _ in range(20):
                for group in loader.next_groups(2, timeout=PATIENCE):
                    assert group.discarded == "too_long"
                    assert [(c.index, c.outcome) for c in group.dropped] == [
                        (i, "discarded:too_long") for i in range(GROUP)
                    ]
        assert not server.requests()


@pytest.mark.parametrize("zero_variance", ["discard", "keep"])
def test_a_row_is_of_groups_that_are_not_trained_for_whatever_reason(zero_variance: str) -> None:
    def group(*rewards: float, discarded: str | None = None) -> Group:
        completions = [Completion(0, i, [4], [-1.0], [0], "stop", reward=r) for i, r in enumerate(rewards)]
        return Group(0, Prompt(0, "r", "p", [3], {}), completions, discarded)

    rules = GroupRules(PPOClip(), zero_variance, 3)
    assert rules.judge(group(1.0, 0.0, discarded="refused")) == "refused", "rewards do not bring it back"
    assert rules.judge(group(discarded="invalid")) == "invalid"
    assert rules.judge(group(1.0, 0.0)) is None  # the row starts again
    rules.judge(group(0.0, 0.0)), rules.judge(group(discarded="invalid"))
    with pytest.raises(NothingToLearn, match="3 groups in a row"):
        rules.judge(group(discarded="refused"))


def test_what_is_left_out_is_counted_and_has_no_variance_to_speak_of(tiny_dir: Path, tmp_path: Path) -> None:
    """Of the groups of the first step, one is refused and one has no usable answer: neither is a group of equals."""

    def of(index: int) -> Any:
        return lambda call: rollout(call) and call.body["token_ids"] == prompt_ids(index)

    rewards = itertools.count()
    unequal = Scorer(lambda _: float(next(rewards)))
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1, scorer=unequal) as trainer:
        server.add_fault(Fault("generate", status=400, when=of(0)))
        server.add_fault(Fault("generate", edit=missing("logprobs"), when=of(2)))
        trainer.run()
    (line,) = lines(tmp_path)
    assert (line["groups/consumed"], line["groups/trained"], line["groups/left_out"]) == (4, 2, 2)
    assert line["groups/zero_variance"] == 0
    rollouts = lines(tmp_path, "rollouts")
    assert [(row["group"], row["index"]) for row in rollouts] == [(g, i) for g in range(4) for i in range(4)]
    nothing = {"completion": "", "reward": None, "rewards": {}, "advantage": None, "finish_reason": None, "lag": None}
    for group, outcome in ((0, "discarded:refused"), (2, "discarded:invalid:logprobs:missing")):
        for row in (row for row in rollouts if row["group"] == group):
            assert {**row, **nothing, "version_first": None, "version_last": None, "outcome": outcome} == row
            assert (row["tokens"] > 0) == (group == 2), "tokens of an unusable answer are generated all the same"
    assert sum(row["tokens"] for row in rollouts if row["outcome"] == "trained") == line["tokens/trained"]
    assert sum(row["tokens"] for row in rollouts if row["outcome"] != "trained") == line["tokens/discarded"]


def test_a_part_of_a_group_that_is_unusable_has_its_lines_beside_the_others(tiny_dir: Path, tmp_path: Path) -> None:
    rewards = itertools.count()
    unequal = Scorer(lambda _: float(next(rewards)))
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1, scorer=unequal) as trainer:
        server.add_fault(
            Fault("generate", edit=missing("logprobs"), when=lambda call: call.body["request_id"] in ("0-0-1", "0-1-2"))
        )
        trainer.run()
    outcomes = [(row["group"], row["index"], row["outcome"]) for row in lines(tmp_path, "rollouts")]
    unusable = {(0, 1), (1, 2)}
    assert outcomes == [
        (g, i, "discarded:invalid:logprobs:missing" if (g, i) in unusable else "trained")
        for g in range(2)
        for i in range(4)
    ]


def test_a_row_of_several_kinds_says_so_of_each(tiny_dir: Path, tmp_path: Path) -> None:
    """Most groups all right, some refused: the run ends well, and does not claim that all is solved."""
    with (
        FakeServer(tiny_dir) as server,
        # one group at a time, and the refused one first: a refusal comes sooner than a score, and would overtake others
        loop([server.url], tiny_dir, tmp_path, limit=6, max_inflight=4, scorer=Scorer(lambda _: 1.0)) as trainer,
    ):
        first = prompt_ids(0)
        server.add_fault(Fault("generate", status=400, when=lambda c: rollout(c) and c.body["token_ids"] == first))
        reason = trainer.run()
    assert "Every completion is right" not in reason
    assert "5 all_right: as far as they tell" in reason
    assert "1 refused: The server refuses the requests" in reason


def test_a_group_that_is_left_out_with_equal_rewards_is_counted_once() -> None:
    completions = [Completion(0, i, [4], [-1.0], [0], "stop", reward=1.0) for i in range(3)]
    metrics = group_metrics([Group(0, Prompt(0, "r", "p", [3], {}), completions, "refused")])
    assert (metrics["groups/zero_variance"], metrics["groups/all_right"], metrics["groups/left_out"]) == (0, 0, 1)
