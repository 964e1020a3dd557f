"""`python run.py` with the real vLLM, end to end: it learns, the laws hold in its folder, and it ends in order.

Runs that launch servers are few, since a start costs 10 to 25 s; the others attach to a server of real_servers.py. A
run begins with other weights than its server was started from, so that everything must come through the sync.
"""

import json
import math
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from composed import ROOT
from real import RealServer
from real_run import Run, check_laws
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from grpo.replay.__main__ import main as replay
from grpo.rollout.control import PlainControl
from grpo.token_record import read, recorded_steps

pytest_plugins = ["real_servers"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FILES = "status.json metrics.jsonl rollouts.jsonl evals.jsonl summary.json report.html run.log .hydra/config.yaml"
CHECKPOINT = "config.json model.safetensors tokenizer.json trainer.pt"
Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts runs; none of them outlives the tests."""
    runs: list[Run] = []

    def start(*overrides: str, ranks: int = 1) -> Run:
        runs.append(Run(tmp_path_factory.mktemp("run") / "folder", *overrides, ranks=ranks))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        assert run.survivors() == []


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Overrides for 5 steps with a tiny policy, tied or not: learn to write completions of 60 tokens."""
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}*{7 * i % 50}="}) + "\n" for i in range(50)))
    models = {
        tied: save_tiny_model(tmp_path_factory.mktemp("policy"), tied=tied, seed=6 if tied else 1)
        for tied in (False, True)
    }

    def task(*, tied: bool = False) -> list[str]:
        return [
            f"model.path={models[tied]}",
            f"data.path={data}",
            "data=jsonl",
            "data.reward=[{kind: length, target: 60, scale: 20}]",
            "data.answer=null",
            "data.eval_rows=8",
            "data.max_prompt_tokens=16",
            "data.max_tokens=100",
            "model.lr=0.01",
            "train.steps=5",
            "train.batch_size=16",
            "train.eval_every=2",
            "rollout.group_size=4",
            "sync.verify_every=1",
        ]

    return task


@pytest.fixture(scope="module")
def attached(start: Start, task: Callable[..., list[str]]) -> Callable[..., Run]:
    """Starts that task on a server that is there."""

    def attached(server: RealServer, *overrides: str, ranks: int = 1) -> Run:
        return start(*task(tied=server.tied), f"rollout.urls=[{server.url}]", *overrides, ranks=ranks)

    return attached


def finish(run: Run) -> Run:
    assert run.end() == 0, run.output
    assert run.status()["state"] == "finished"
    assert run.survivors() == []
    return run


# ---- the default run ----


@pytest.fixture(scope="module")
def default(start: Start) -> Run:
    return finish(start("train.steps=12", "train.eval_every=12"))


def test_default_run_learns(default: Run) -> None:
    before, after = default.lines("evals")
    assert (before["n"], after["n"]) == (256, 256)
    assert before["accuracy"] <= 0.45
    assert before["high"] < after["low"]  # the intervals are apart
    rewards = [line["reward/mean"] for line in default.lines("metrics")]
    assert max(rewards[:2]) < min(rewards[-2:])


def test_default_run_keeps_the_laws(default: Run) -> None:
    check_laws(default, steps=12, max_staleness=1)
    lags = {row["lag"] for row in default.lines("rollouts")}
    assert lags == {0, 1}  # generation does run ahead


def test_default_run_leaves_a_complete_folder(default: Run) -> None:
    for name in (*FILES.split(), "server.log", *(f"checkpoints/step_000012/{file}" for file in CHECKPOINT.split())):
        assert (default.folder / name).stat().st_size > 0, name
    status, summary = default.status(), json.loads((default.folder / "summary.json").read_text())
    assert (status["step"], status["steps"], status["error"]) == (12, 12, None)
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] > 0
    assert str(default.folder) in default.output


# ---- several turns ----


def test_several_turns_are_sampled_and_trained_as_one_sequence(
    attached: Callable[..., Run], untied_server: RealServer
) -> None:
    """Law 4 over turns: the trainer, reading the observations too, gives every sampled token the sampler's logprob."""
    game = f"{{kind: {ROOT / 'tests' / 'my_environments.py'}:Counting, limit: 3, max_turn_tokens: 20}}"
    run = finish(
        attached(
            untied_server,
            f"data.environment={game}",
            "data.reward=[environment, {kind: length, target: 60, scale: 20}]",
            "data.answer=prompt",
            "rollout.stop=['1','2','3','a','b','c','e']",
            "rollout.max_staleness=0",
            "train.steps=2",
            "data.max_tokens=80",
        )
    )
    check_laws(run, steps=2, max_staleness=0)
    rows, metrics = run.lines("rollouts"), run.lines("metrics")
    assert any(sum(turn["by_policy"] for turn in row["turns"]) == 3 for row in rows)
    for row in rows:
        assert row["tokens"] == sum(turn["tokens"] for turn in row["turns"] if turn["by_policy"])
        seen = [turn["text"] for turn in row["turns"] if not turn["by_policy"]]
        assert seen == [f"{n + 1} {row['prompt']}" for n in range(len(seen))]
        assert row["completion"] == "".join(turn["text"] for turn in row["turns"])
    for line in metrics:
        assert abs(line["ratio/max"] - 1) < 1e-4
        assert abs(line["ratio/min"] - 1) < 1e-4
        assert line["turns/max"] == 3
    assert metrics[-1]["tokens/trained"] == sum(row["tokens"] for row in rows if row["outcome"] == "trained")


# ---- asynchrony, sync and servers ----


def test_staleness_0_is_on_policy_and_does_not_depend_on_what_the_server_did_before(
    attached: Callable[..., Run], untied_server: RealServer
) -> None:
    first = finish(attached(untied_server, "rollout.max_staleness=0"))
    second = finish(attached(untied_server, "rollout.max_staleness=0"))
    check_laws(first, steps=5, max_staleness=0)
    for ours, theirs in zip(first.lines("metrics"), second.lines("metrics"), strict=True):
        assert ours["ratio/max"] < 1 + 1e-4
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4, abs=1e-6)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert second.lines("rollouts") == first.lines("rollouts")


def test_completions_live_through_syncs_and_their_ratio_stays_exact(
    attached: Callable[..., Run], untied_server: RealServer
) -> None:
    """CASES 31, as a run sees it: tokens that an old completion got after a sync have lag 0 and the ratio 1.

    One group at a time makes generation the slower side on any machine, so that every sync meets completions that the
    next step trains. What is recorded of them is enough to compute a step again.
    """
    long = ("data.max_tokens=300", "data.reward=[{kind: length, target: 200, scale: 100}]", "train.eval_every=3")
    recorded = ("train.record_tokens=true", "train.checkpoint_every=6")
    run = finish(attached(untied_server, "rollout.max_inflight=4", "train.steps=7", *long, *recorded))
    check_laws(run, steps=7, max_staleness=1)
    metrics, rollouts = run.lines("metrics"), run.lines("rollouts")
    assert max(row["lag"] for row in rollouts) == 1
    assert any(row["version_first"] < row["version_last"] for row in rollouts)
    survived = 0  # tokens of lag 0 in completions that began under older weights
    for line in metrics:
        young = [row["tokens"] for row in rollouts if row["step"] == line["step"] and row["lag"] == 0]
        survived += line.get("lag_0/tokens", 0) - sum(young)
    assert survived > 50
    old = [line["lag_1/kl"] for line in metrics if "lag_1/kl" in line]
    assert max(old) > 1e-4  # the weights did change meanwhile: a ratio of 1 is no matter of course
    check_tokens(run)
    assert replay([str(run.folder), "loss=tis"]) == 0  # step 7 at checkpoint 6: the run's own numbers came out
    (step,) = json.loads((run.folder / "replay.json").read_text())["steps"]
    assert step["proof"]["figures"].keys() >= {"loss", "grad_norm", "kl/sampler"}
    assert step["losses"][1]["metrics"]["lag/max"] >= 1


def check_tokens(run: Run) -> None:
    """The policy's logprobs that are recorded: of each trained token, equal to the sampler's at lag 0; k3 as logged."""
    for line in run.lines("metrics"):
        record = read(run.folder, line["step"])
        k3: dict[int, list[float]] = {}
        for c in (c for g in record.groups for c in g.completions):
            assert len(c.policy_logprobs) == len(c.logprobs)
            for policy, sampler, version in zip(c.policy_logprobs, c.logprobs, c.versions, strict=True):
                k3.setdefault(record.version - version, []).append(math.expm1(policy - sampler) - (policy - sampler))
                assert record.version > version or policy == pytest.approx(sampler, abs=1e-4)
        for lag, values in k3.items():
            assert sum(values) / len(values) == pytest.approx(line[f"lag_{lag}/kl"], rel=1e-3, abs=1e-9)


def test_pause_wait_lets_requests_finish(attached: Callable[..., Run], untied_server: RealServer) -> None:
    run = finish(attached(untied_server, "sync.pause=wait", "rollout.max_staleness=2"))
    check_laws(run, steps=5, max_staleness=2)
    assert max(row["lag"] for row in run.lines("rollouts")) == 2
    assert all(row["version_first"] == row["version_last"] for row in run.lines("rollouts"))


def test_tied_model(attached: Callable[..., Run], tied_server: RealServer) -> None:
    run = finish(attached(tied_server, "rollout.max_staleness=1"))
    check_laws(run, steps=5, max_staleness=1)
    assert max(line.get("lag_1/kl", 0.0) for line in run.lines("metrics")) > 1e-4


def test_two_ranks_keep_the_laws(attached: Callable[..., Run], tied_server: RealServer) -> None:
    """torchrun: a tied model in shards, synced and proven at every step; generation runs ahead."""
    recorded = ("train.record_tokens=true", "train.checkpoint_every=4", "train.minibatches=2")
    run = finish(attached(tied_server, "rollout.max_staleness=1", *recorded, ranks=2))
    check_laws(run, steps=5, max_staleness=1)
    assert run.status()["ranks"] == 2
    assert {row["lag"] for row in run.lines("rollouts")} == {0, 1}
    check_tokens(run)
    assert replay([str(run.folder)]) == 0  # one process computes step 5 from checkpoint 4
    (step,) = json.loads((run.folder / "replay.json").read_text())["steps"]
    assert step["proof"]["reproduced"], step["proof"]["off"]


def test_adapters_are_served_merged_and_gone_on_from(attached: Callable[..., Run], untied_server: RealServer) -> None:
    """LoRA: the laws hold of merged weights, before and after a resume, and the folder gives a step again."""
    lora = ("model.lora_rank=4", "loss.kl_coefficient=0.01", "train.record_tokens=true", "train.checkpoint_every=2")
    run = finish(attached(untied_server, *lora, "train.steps=3"))
    again = finish(Run(run.folder, "train.steps=5", resume=True))
    check_laws(again, steps=5, max_staleness=1)
    assert max(line.get("lag_1/kl", 0.0) for line in again.lines("metrics")) > 1e-4  # they do something
    assert (run.folder / "checkpoints/step_000005/adapter/adapter_model.safetensors").exists()
    check_tokens(again)
    assert replay([str(run.folder)]) == 0  # step 5 from the base and checkpoint 4's adapter
    (step,) = json.loads((run.folder / "replay.json").read_text())["steps"]
    assert step["proof"]["reproduced"], step["proof"]["off"]


# ---- endings ----


def test_two_servers_then_kill_9_then_resume(
    start: Start, task: Callable[..., list[str]], untied_server: RealServer
) -> None:
    """Both servers get every version (each sync is proven on both); none survives a run that cannot say goodbye."""
    recorded = ("train.record_tokens=true", "train.checkpoint_every=2")
    run = start(*task(), "rollout.servers=2", "train.steps=500", *recorded)
    run.until_steps(5)
    assert len(run.below("VLLM::EngineCore")) == 2
    run.kill()
    assert run.survivors() == []
    assert run.status()["state"] == "running"
    again = finish(Run(run.folder, f"rollout.urls=[{untied_server.url}]", "train.steps=8", resume=True))
    check_laws(again, steps=8, max_staleness=1)
    assert recorded_steps(run.folder) == list(range(1, 9))
    assert replay([str(run.folder)]) == 0


def test_sigterm_while_the_server_starts(start: Start) -> None:
    run = start()
    while not run.below("grpo.rollout.vllm_main"):
        assert run.process.poll() is None, run.output
    run.process.terminate()
    assert run.end(60) == 143
    assert run.status()["state"] == "interrupted"
    assert run.survivors() == []


def kill_engine(run: Run) -> None:
    (engine,) = run.below("VLLM::EngineCore")
    os.kill(engine, signal.SIGKILL)


def test_server_that_dies_twice_then_resume_then_sigterm(start: Start, default: Run) -> None:
    """It is started again once, as often as it may. The model is the checkpoint of another run, so that one is a
    model directory for vLLM as it is."""
    model = default.folder / "checkpoints/step_000012"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    run = start(
        f"model.path={model}",
        "train.steps=500",
        "train.eval_every=500",
        "train.checkpoint_every=100",
        "rollout.restarts=1",
    )
    run.until_steps(2)
    kill_engine(run)
    while not run.lines("metrics")[-1]["sampler/restarts"]:
        run.until_steps(len(run.lines("metrics")) + 1)
    run.until_steps(len(run.lines("metrics")) + 3)
    kill_engine(run)
    assert run.end(60) == 1
    assert run.survivors() == []
    status = run.status()
    assert (status["state"], status["error"]["type"]) == ("failed", "ServerDied")
    assert "server.log" in status["error"]["message"]
    assert "EngineCore" in status["error"]["message"]
    assert "Traceback" in (run.folder / "run.log").read_text()
    before = default.lines("evals")[-1], run.lines("evals")[0]
    assert before[0]["accuracy"] == pytest.approx(before[1]["accuracy"], abs=0.02)  # the same weights, the same seeds
    step: int = status["step"]
    check_laws(run, steps=step, max_staleness=1)
    assert (run.folder / f"checkpoints/step_{step:06d}/trainer.pt").exists()

    again = Run(run.folder, resume=True)
    again.until_steps(step + 3)
    again.process.terminate()
    assert again.end(60) == 143
    assert again.survivors() == []
    status = again.status()
    assert (status["state"], status["error"]["type"]) == ("interrupted", "Interrupted")
    assert (run.folder / f"checkpoints/step_{status['step']:06d}/trainer.pt").exists()
    check_laws(again, steps=status["step"], max_staleness=1)


def test_server_that_a_killed_run_left_within_a_sync_serves_the_next_run(
    attached: Callable[..., Run], untied_server: RealServer
) -> None:
    control = PlainControl(untied_server.url)
    control.post("/pause", params={"mode": "keep"}, timeout=60)
    control.post("/start_weight_update", timeout=60)
    run = finish(attached(untied_server, "train.steps=2"))
    check_laws(run, steps=2, max_staleness=1)
    assert "a weight update was left open" in (run.folder / "run.log").read_text()
