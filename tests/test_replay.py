"""Replays of a run around a fake server with a real tiny model: its own numbers come out, and others are right."""

import json
import math
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import composed
from fake_server import FakeServer
from loop import Scorer, loop
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM

from grpo import objects, token_record
from grpo.losses import PPOClip
from grpo.losses.base import Loss
from grpo.replay import session
from grpo.replay.__main__ import main
from grpo.replay.command import parse
from grpo.replay.compare import _groups
from grpo.replay.show import show
from grpo.token_record import TokenRecord, TokenRecorder
from grpo.types import Completion, Group, Prompt

Result = dict[str, Any]


def make_run(model: Path, folder: Path, *overrides: str) -> Path:
    """Five recorded steps of 8 completions with lags up to 2; checkpoints of steps 2 and 4 (and 5, the end)."""
    config = composed(
        *(f"model.path={model}", "model.device=cpu", "model.lr=0.003", "train.steps=5", "train.threads=1"),
        *("train.tokens_per_microbatch=64", "rollout.temperature=0.8", "data.max_tokens=6", *overrides),
    )
    keys = OmegaConf.to_container(config, resolve=True)
    assert isinstance(keys, dict)
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    with (
        FakeServer(model) as server,
        loop(
            [server.url],
            model,
            folder,
            steps=5,
            max_staleness=2,
            temperature=0.8,
            lr=0.003,
            loss=objects.build_loss(OmegaConf.create(keys["loss"])),
            minibatches=config.train.minibatches,
            scorer=Scorer(lambda ids: sum(ids) % 5 / 5),
            verify_every=0,
            checkpoint_every=2,
        ) as trainer,
    ):
        trainer.recorder.tokens = TokenRecorder(folder, token_record.replay_facts(keys, str(model), {}))
        trainer.run()
    return folder


@pytest.fixture(scope="module")
def run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the default loss and a KL penalty. Read only but for replay.json."""
    return make_run(tiny_dir, tmp_path_factory.mktemp("replay") / "run", "loss.kl_coefficient=0.1")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "copied")


def replay(folder: Path, *arguments: str) -> Result:
    return session.run(parse([str(folder), *arguments]))


def line_of(folder: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


def rewrite(folder: Path, step: int, change: Callable[[list[Group]], Any] = lambda groups: None, **facts: Any) -> None:
    """Change what is recorded of a step."""
    record = token_record.read(folder, step)
    completions = [c for g in record.groups for c in g.completions]
    for c, advantage, outcome in zip(completions, record.advantages, record.outcomes, strict=True):
        c.advantage, c.outcome = advantage, outcome
    change([g for g in record.groups if g.discarded is None])
    TokenRecorder(folder, record.facts | facts).write(step, record.version, record.groups)


def refused(*arguments: str) -> str:
    """The one line of a mistake, without its `error: `."""
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        assert main(list(arguments)) == 2
    assert len(printed) == 1
    assert "\n" not in printed[0]
    return printed[0].removeprefix("error: ")


# ---- the proof ----


def check_proof(folder: Path, result: Result) -> None:
    """Beside the code's own verdict: against metrics.jsonl, on a step where lag, gradient and clip are not trivial."""
    (step,) = result["steps"]
    line, own = line_of(folder, 5), step["losses"][0]["metrics"]
    assert (result["checkpoint"], result["version"], step["step"]) == ("step_000004", 4, 5)
    assert line["lag/max"] >= 1
    assert line["grad_norm"] > 0.01
    assert own["loss"] == pytest.approx(line["loss"], abs=1e-6)
    assert own["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)
    for key in ("loss/policy", "loss/kl_reference", "clip/fraction", "kl/sampler", "ess", "entropy", "lag/mean"):
        assert own[key] == pytest.approx(line[key], rel=1e-5, abs=1e-6), key
    assert {key for key in line if key.startswith("lag_")} <= set(own)
    assert step["proof"]["reproduced"]
    assert len(step["proof"]["figures"]) > 30


def test_the_runs_own_loss_comes_out_as_it_was_trained(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "replay.json"}
    check_proof(run, replay(run))
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "replay.json"}
    assert after == before
    written = json.loads((run / "replay.json").read_text())
    assert written["steps"][0]["proof"]["reproduced"] is True


def test_with_minibatches_the_runs_own_path_is_followed(tiny_dir: Path, tmp_path: Path) -> None:
    """Each minibatch at the weights that the run's own updates had led to; another loss is taken at the same places."""
    folder = make_run(tiny_dir, tmp_path / "run", "train.minibatches=3", "loss.kl_coefficient=0.1", "loss=tis")
    result = replay(folder, "loss=own", "loss.clip_high=0.28", "loss=reinforce")
    check_proof(folder, result)
    (step,) = result["steps"]
    own, same, reinforce = (loss["metrics"] for loss in step["losses"])
    assert line_of(folder, 5)["optimizer_steps"] == 3
    assert same == own
    assert step["cosine"][0][1] == pytest.approx(1.0, abs=1e-12)
    assert step["cosine"][0][2] < 0.999
    assert reinforce["weight/mean"] == pytest.approx(1.0, abs=1e-12)
    assert refused(str(folder), "steps=4-5").startswith("steps=4-5: with train.minibatches=3 a replay follows")


def test_a_number_that_is_not_reproduced_is_said_and_fails(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copied)]) == 0
    assert capsys.readouterr().out.count(": reproduced\n") == 1
    text = (copied / "metrics.jsonl").read_text()
    norm = line_of(copied, 5)["grad_norm"]
    (copied / "metrics.jsonl").write_text(text.replace(f'"grad_norm": {norm}', f'"grad_norm": {norm * 1.001}'))
    assert main([str(copied)]) == 1
    assert "NOT reproduced: grad_norm\n" in capsys.readouterr().out


def test_rewards_that_do_not_give_the_advantages_are_refused(copied: Path) -> None:
    rewrite(copied, 5, lambda kept: setattr(kept[0].completions[0], "reward", 7.0))
    assert "was trained with advantage" in refused(str(copied))


# ---- other losses, against a computation of their own ----


def explicit(run: Path, token_loss: Callable[[Any, Any, Any], Any]) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Token mean of `token_loss(new, sampler, advantage)` on step 5 at checkpoint 4 by transformers alone.

    Returns the loss, its gradient (flat), and the ratios.
    """
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_000004")
    record = token_record.read(run, 5)
    completions = [(g, c) for g in record.groups for c in g.completions]
    losses, ratios = [], []
    for (g, c), advantage, outcome in zip(completions, record.advantages, record.outcomes, strict=True):
        if outcome != "trained":
            continue
        prompt = g.prompt.token_ids
        logits = model(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1] / 0.8
        new = logits.log_softmax(-1)[torch.arange(len(c.token_ids)), c.token_ids]
        old = torch.tensor(c.logprobs)
        losses.append(token_loss(new, old, advantage))
        ratios.append((new - old).exp().detach())
    loss = torch.cat(losses).mean()
    loss.backward()
    return (
        float(loss.detach()),
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
        torch.cat(ratios),
    )


def test_other_losses_at_the_same_weights(run: Path) -> None:
    result = replay(run, "loss=reinforce", "loss=grpo", "loss=tis,cispo", "loss=own", "loss.kl_coefficient=0")
    (step,) = result["steps"]
    assert [loss["name"] for loss in step["losses"]] == [
        "own",
        "reinforce",
        "grpo",
        "tis",
        "cispo",
        "own kl_coefficient=0",
    ]
    metrics = [loss["metrics"] for loss in step["losses"]]
    reinforce, g1, ratio = explicit(run, lambda new, old, a: -a * new)
    grpo, g2, _ = explicit(run, lambda new, old, a: -a * (new - old).exp())
    clip, g5, _ = explicit(
        run, lambda new, old, a: -torch.minimum(a * (new - old).exp(), a * (new - old).exp().clamp(0.8, 1.28))
    )
    for i, value, gradient in ((1, reinforce, g1), (2, grpo, g2), (5, clip, g5)):
        assert metrics[i]["loss"] == pytest.approx(value, abs=1e-6)
        assert metrics[i]["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    cosine = step["cosine"]
    for i, j, a, b in ((1, 2, g1, g2), (1, 5, g1, g5), (5, 2, g5, g2)):
        expected = float(a.double().dot(b.double()) / (a.double().norm() * b.double().norm()))
        assert cosine[i][j] == cosine[j][i] == pytest.approx(expected, abs=1e-5)
    assert cosine[1][2] < 0.9999, "a comparison that means something"
    # one optimizer step: tis is the ratio capped at 2, times REINFORCE's gradient; cispo is capped at 5
    tis, g3, _ = explicit(run, lambda new, old, a: -a * (new - old).exp().detach().clamp(max=2.0) * new)
    assert metrics[3]["grad_norm"] == pytest.approx(float(g3.norm()), rel=1e-5)
    assert metrics[2]["weight/mean"] == pytest.approx(float(ratio.double().mean()), rel=1e-5)
    assert metrics[2]["weight/ess"] == pytest.approx(metrics[2]["ess"], rel=1e-5)
    assert metrics[3]["weight/mean"] == pytest.approx(float(ratio.double().clamp(max=2.0).mean()), rel=1e-5)
    assert metrics[5]["loss"] == pytest.approx(metrics[0]["loss"] - metrics[0]["loss/kl_reference"], abs=1e-9)
    assert math.isfinite(tis)
    assert metrics[0]["weight/mean"] == metrics[5]["weight/mean"] < 1, "the KL penalty is no part of it, the clip is"


def test_figures_by_lag_add_up(copied: Path) -> None:
    def younger(kept: list[Group]) -> None:  # most tokens have lag 2: let some have another label
        for c in kept[0].completions[1:]:
            c.versions = [3] * (len(c.versions) - 1) + [4]

    rewrite(copied, 5, younger)
    (step,) = replay(copied, "loss=grpo")["steps"]
    m = step["losses"][1]["metrics"]
    lags = sorted(int(key[4:-7]) for key in m if key.startswith("lag_") and key.endswith("/tokens"))
    tokens = [m[f"lag_{k}/tokens"] for k in lags]
    for over_all, by_lag in (("kl/sampler", "kl"), ("clip/fraction", "clip_fraction"), ("weight/mean", "weight_mean")):
        total = sum(n * m[f"lag_{k}/{by_lag}"] for n, k in zip(tokens, lags, strict=True)) / sum(tokens)
        assert m[over_all] == pytest.approx(total, rel=1e-6, abs=1e-12), over_all
    for k in lags:  # an unclipped token counts by its ratio
        assert m[f"lag_{k}/weight_mean"] == pytest.approx(m[f"lag_{k}/ratio_mean"], rel=1e-5)
    assert len({round(m[f"lag_{k}/weight_mean"], 6) for k in lags}) == len(lags) > 1


def test_a_loss_takes_its_own_advantages_and_its_own_penalty_on_length(copied: Path) -> None:
    """Completions are up to 6 tokens: with a share of 0.5 the penalty begins after 3."""
    overlong = ["loss=reinforce", "loss.overlong_share=0.5", "loss.overlong_factor=2"]
    result = replay(copied, "loss=reinforce", "loss=reinforce", "loss.advantage=mean", *overlong)
    _, plain, mean, penalised = (loss["metrics"] for loss in result["steps"][0]["losses"])
    lengths = set()

    def by_hand(kept: list[Group]) -> None:
        for g in kept:
            row = [
                c.reward - 2 * min(max(1 - (6 - c.tokens) / 3, 0.0), 1.0) for c in g.completions if c.reward is not None
            ]
            lengths.update(c.tokens for c in g.completions)
            for c, r in zip(g.completions, row, strict=True):
                c.reward = r
                c.advantage = (r - sum(row) / 4) / (float(torch.tensor(row, dtype=torch.float64).std()) + 1e-6)

    rewrite(copied, 5, by_hand)
    assert min(lengths) <= 3 < max(lengths), "some are punished and some are not"
    expected = replay(copied, "loss=reinforce")["steps"][0]["losses"][1]["metrics"]
    assert penalised["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert penalised["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert len({round(m["loss"], 9) for m in (plain, mean, penalised)}) == 3


def test_the_runs_own_penalty_on_length_is_taken_off_for_another_loss() -> None:
    """Rewards 1.0 and 0.5, of which a completion of 9 tokens lost 0.8 and one of 4 tokens nothing."""
    completions = [
        Completion(0, i, [3] * n, [-1.0] * n, [0] * n, "stop", reward=reward, rewards={"r": base, "overlong": penalty})
        for i, (n, reward, base, penalty) in enumerate([(9, 0.2, 1.0, -0.8), (4, 0.5, 0.5, None)])
    ]
    record = TokenRecord(1, 0, {}, [Group(0, Prompt(0, "", "", [3], {}), completions)], [], [])

    def rewards(own: Loss, other: Loss) -> list[float | None]:
        (group,) = _groups(record, own, other)
        return [c.reward for c in group.completions]

    own = PPOClip(overlong_share=0.5, max_tokens=10)
    assert rewards(own, own) == rewards(own, PPOClip(overlong_share=0.5, max_tokens=10)) == [0.2, 0.5]
    assert rewards(own, PPOClip()) == [1.0, 0.5]
    assert rewards(own, PPOClip(overlong_share=0.5, overlong_factor=2, max_tokens=10)) == pytest.approx([-0.6, 0.5])
    # a reward of the data's that is called so is no penalty of the loss's
    assert rewards(PPOClip(), PPOClip(cap=2.0, correction="truncate")) == [0.2, 0.5]
    with pytest.raises(ValueError, match=r"loss.overlong_share=0.5: the run's rewards punish length already"):
        rewards(PPOClip(), own)
    assert [c.reward for c in completions] == [0.2, 0.5], "the record itself stays"


# ---- which checkpoint, which steps ----


def test_an_older_batch_at_a_newer_checkpoint_has_a_larger_lag(run: Path) -> None:
    result = replay(run, "steps=3-5")
    assert [step["step"] for step in result["steps"]] == [3, 4, 5]
    for step in result["steps"]:
        shift = 5 - step["step"]
        own = step["losses"][0]["metrics"]
        assert own["lag/mean"] == pytest.approx(line_of(run, step["step"])["lag/mean"] + shift)
        assert (step["proof"] is None) == (shift > 0)
    at_2 = replay(run, "checkpoint=2")
    assert (at_2["checkpoint"], at_2["steps"][0]["step"]) == ("step_000002", 3)
    assert at_2["steps"][0]["proof"]["reproduced"]
    by_path = replay(run, f"checkpoint={run / 'checkpoints' / 'step_000002'}")
    assert by_path["steps"] == at_2["steps"]


def test_tokens_of_weights_that_the_checkpoint_does_not_have_are_refused(copied: Path) -> None:
    def newer(kept: list[Group]) -> None:
        kept[0].completions[0].versions[-1] = 3

    rewrite(copied, 4, newer)
    assert refused(str(copied), "checkpoint=2", "steps=4") == (
        "steps=4: its tokens were sampled by weights up to version 3, step_000002 holds version 2; choose a later "
        "checkpoint or an earlier step"
    )


def test_weights_that_have_changed_on_the_disk_are_not_replayed(copied: Path) -> None:
    file = copied / "checkpoints" / "step_000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert refused(str(copied), "checkpoint=2") == (
        f"checkpoint={file.parent}: model.safetensors is not what was written (its checksum in SHA256SUMS is another); "
        "choose another"
    )


def test_steps_trained_with_other_settings_are_not_mixed(copied: Path) -> None:
    rewrite(copied, 4, temperature=0.9)
    assert refused(str(copied), "steps=4,5").startswith("steps=4,5: trained with different settings")


MISTAKES = {
    "model.lr=1": "model.lr=1: a replay takes checkpoint, steps, out, device, loss=NAME and loss.KEY=VALUE",
    "loss=nope": "loss=nope: there is no such choice; choose one of cispo, dapo",
    "loss=tis loss.cup=2": "loss.cup: no such key; did you mean loss.cap?",
    "loss=tis loss.cap=-1": "tis cap=-1: loss.cap=-1: the largest weight must be above 0",
    "loss=tis loss.cap=a": "tis cap=a: loss.cap='a': expected a finite number",
    "loss.cup=2": "loss.cup: the run's loss has no such key; +loss.cup adds one",
    "+loss.cup=2": "own +cup=2: loss.cup: no such key",
    "loss=tis loss=tis": "loss=tis: asked for twice",
    "loss=tis loss.cap=interval(1,2)": "loss.cap=interval(1,2): write the values, with commas between them",
    "checkpoint=3": "checkpoint=3: no such checkpoint in",
    "checkpoint=5": "steps=6: not recorded in",
    "steps=9": "steps=9: not recorded in",
    "steps=a": "steps=a: write 21, 18-21 or 18,20,21",
    "steps=5-4": "steps=5-4: there is none in it",
    "device=cuda": "model.device=cuda: this machine has no CUDA device",
    "other": "{run} other: give one run folder",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(run: Path, arguments: str) -> None:
    assert refused(str(run), *arguments.split(" ")).startswith(MISTAKES[arguments].replace("{run}", str(run)))


def test_a_folder_without_what_a_replay_needs(run: Path, copied: Path, tmp_path: Path) -> None:
    assert refused(str(tmp_path)).startswith(f"{tmp_path}: no run folder")
    shutil.rmtree(copied / "checkpoints" / "step_000002")
    shutil.rmtree(copied / "checkpoints" / "step_000004")
    assert "no checkpoint with a recorded step after it (checkpoints: step_000005; recorded steps: 1-5)" in refused(
        str(copied)
    )
    shutil.rmtree(copied / "tokens")
    assert refused(str(copied)).endswith("no tokens are recorded there; train.record_tokens=true records them")


# ---- the command line and the tables ----


def test_every_loss_has_the_overrides_behind_it() -> None:
    request = parse(
        [
            "r",
            "loss=tis,icepop",
            "loss.clip_high=0.3",
            "loss=gspo",
            "loss=tis",
            "loss.cap=1,2",
            "+loss.x=1",
            "out=o.json",
        ]
    )
    assert request.losses == [
        ["loss=tis", "loss.clip_high=0.3"],
        ["loss=icepop", "loss.clip_high=0.3"],
        ["loss=gspo"],
        ["loss=tis", "loss.cap=1", "+loss.x=1"],
        ["loss=tis", "loss.cap=2", "+loss.x=1"],
    ]
    assert (request.run, request.out, request.steps) == (Path("r"), Path("o.json"), None)
    assert parse(["steps=[3,5-7]", "r"]).steps == [3, 5, 6, 7]
    assert parse(["r", "loss.cap=2"]).losses == [["loss=own", "loss.cap=2"]]


def test_references_of_a_loss_are_to_the_runs_configuration(run: Path, tmp_path: Path) -> None:
    result = replay(run, "loss=dr_grpo", f"out={tmp_path / 'x.json'}")
    keys = result["losses"][1]["keys"]
    assert (keys["max_tokens"], keys["advantage"], keys["aggregation"]) == (6, "mean", "fixed")
    assert result["losses"][0]["keys"]["kl_coefficient"] == 0.1
    assert json.loads((tmp_path / "x.json").read_text())["losses"] == result["losses"]


def test_no_number_is_cut_in_a_narrow_window(run: Path) -> None:
    text = StringIO()
    result = replay(run, "loss=tis", "loss=gspo", "loss.clip_low=0.1")
    show(result, Console(file=text, width=40))
    assert "…" not in text.getvalue()
    for loss in result["steps"][0]["losses"]:
        assert f"{loss['metrics']['grad_norm']:.4g}" in text.getvalue()
        assert loss["name"] in text.getvalue()
