"""Runs of the drill as processes: SIGKILL at any moment, then resume; the real vLLM and the death of its processes."""

import os
import signal
import time
from pathlib import Path
from random import Random

from command import small
from fake_server import FakeServer
from real_run import Run, check_laws
from safetensors.torch import load_file

from .fake_runs import Outcome

STEPS = 30
PER_RUN = 5  # kills


def kills(count: int, seed: int, model: Path, folder: Path) -> list[Outcome]:
    """So many SIGKILLs, PER_RUN on each run; resumed each time, and compared with a run that nobody killed."""
    outcomes = []
    folder.mkdir()
    with FakeServer(model, tokens_per_second=100) as server:
        overrides = [
            *(o for o in small(server) if not o.startswith("data.eval_rows")),
            "data.eval_rows=0",
            f"train.steps={STEPS}",
            "train.checkpoint_every=2",
            "rollout.max_staleness=0",
            "rollout.zero_variance_batches=1000",
            "model.lr=1e-3",
        ]
        unbroken = Run(folder / "unbroken", *overrides)
        assert unbroken.end() == 0, unbroken.output
        for number in range(-(-count // PER_RUN)):
            draw = Random(f"{seed}/kills/{number}")
            run = Run(folder / str(number), *overrides)
            violations: list[str] = []
            for _ in range(PER_RUN):
                run.until_steps(min(STEPS - 1, max(3, len(run.lines("metrics")) + draw.randrange(1, 5))))
                time.sleep(draw.uniform(0, 0.3))
                run.kill()
                violations += [f"orphan: {title}" for title in run.survivors()]
                run = Run(run.folder, *overrides, resume=True)
                outcomes.append(Outcome("SIGKILL of the run", "failed", "", []))
            if run.end() != 0:
                violations.append(run.output[-2000:])
            try:
                check_laws(run, steps=STEPS, max_staleness=0)
            except AssertionError as error:
                violations.append(str(error))
            if run.lines("rollouts") != unbroken.lines("rollouts"):
                violations.append("what was trained is not what the unbroken run trained")
            difference = most_different(run.folder, unbroken.folder)
            steps = [line["step"] for line in run.lines("metrics")]
            gaps, twice = STEPS - len(set(steps)), len(steps) - len(set(steps))
            told = f"steps {steps[0]} to {steps[-1]}, {gaps} gaps, {twice} twice, parameters differ by {difference:g}"
            print(f"run {number}: {PER_RUN} kills, {told}", flush=True)
            if difference:
                violations.append(f"parameters differ by {difference}")
            outcomes.append(Outcome("killed and resumed", "finished", "", violations))
    return outcomes


def most_different(one: Path, other: Path) -> float:
    """Largest |difference| of a parameter between the last checkpoints of two runs."""
    name = f"checkpoints/step_{STEPS:06d}/model.safetensors"
    ours, theirs = load_file(one / name), load_file(other / name)
    return max(float((ours[k] - theirs[k]).abs().max()) for k in ours.keys() | theirs.keys())


def real_run(number: int, seed: int, folder: Path) -> Outcome:
    """The default run with a launched vLLM: its engine, its API server or the run itself gets a SIGKILL or SIGTERM, or
    the servers stand still for longer than they keep a connection."""
    draw = Random(f"{seed}/real/{number}")
    who = ("VLLM::EngineCore", "grpo.rollout.vllm_main", "run", "terminate", "stand still")[number % 5]
    overrides = ("train.steps=24", "train.eval_every=0", "train.checkpoint_every=2", f"seed={draw.randrange(9)}")
    run = Run(folder, *overrides)
    run.until_steps(draw.randrange(3, 8))  # a checkpoint is there
    time.sleep(draw.uniform(0, 0.2))
    violations: list[str] = []
    if who in ("run", "terminate"):
        run.process.send_signal(signal.SIGKILL if who == "run" else signal.SIGTERM)
        expected = -signal.SIGKILL if who == "run" else 128 + signal.SIGTERM
        if (status := run.end()) != expected:
            violations.append(f"exit status {status}, not {expected}")
        state = {"run": "running", "terminate": "interrupted"}[who]
        if run.status()["state"] != state:
            violations.append(f"state {run.status()['state']}, not {state}")
        violations += [f"orphan: {title}" for title in run.survivors()]
        run = Run(folder, resume=True)
    elif who == "stand still":
        servers = [pid for name in ("grpo.rollout.vllm_main", "VLLM::EngineCore") for pid in run.below(name)]
        for signum, seconds in ((signal.SIGSTOP, draw.uniform(6, 15)), (signal.SIGCONT, 0.0)):
            for pid in servers:
                os.kill(pid, signum)
            time.sleep(seconds)
    else:
        os.kill(run.below(who)[-1], signal.SIGKILL)
    if run.end(400) != 0:
        violations.append(run.output[-2000:])
    violations += [f"orphan: {title}" for title in run.survivors()]
    try:
        check_laws(run, steps=24, max_staleness=1)
    except AssertionError as error:
        violations.append(str(error))
    restarts = run.lines("metrics")[-1]["sampler/restarts"]
    if who not in ("run", "terminate") and restarts != (who != "stand still"):
        violations.append(f"{restarts} servers were started again")
    return Outcome(f"real vLLM: {who}", "finished", "", violations)
