"""A run of the drill with fake servers, in this process, and what must hold of it whatever happened."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fake_server import FakeServer
from loop import Scorer, loop
from real_run import check_lag, check_order

from grpo import checkpoint
from grpo.checkpoint_folder import complete
from grpo.rollout import client, loader, revival

from .cases import GROUPS, KINDS, SIZE, STEPS

DEADLINE = 120.0  # seconds for a request or a phase; a loaded machine is no fault
DEADLINE_MET = 5.0  # where the fault is that it passes


@dataclass
class Outcome:
    kind: str
    ended: str
    why: str
    violations: list[str]


def quick() -> None:
    """Waits of a test's length."""
    client.BACKOFF_FIRST, loader.LOOK_EVERY, revival.POLL, revival.NOTICED = 0.001, 0.02, 0.02, 0.2
    revival.HEALTH_EVERY = 0.05


class Unbroken:
    """What a run without a fault trains, by seed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._rollouts: dict[int, list[dict[str, Any]]] = {}

    def rollouts(self, seed: int) -> list[dict[str, Any]]:
        if seed not in self._rollouts:
            folder = self.folder / f"unbroken-{seed}"
            with FakeServer(self.model) as server, loop([server.url], self.model, folder, **options(seed)) as trainer:
                trainer.run()
            self._rollouts[seed] = lines(folder, "rollouts.jsonl")
        return self._rollouts[seed]


def options(seed: int) -> dict[str, Any]:
    return {"steps": STEPS, "groups": GROUPS, "group_size": SIZE, "zero_variance": "keep", "lr": 0.01, "seed": seed}


def run(number: int, seed: int, model: Path, folder: Path, unbroken: Unbroken) -> Outcome:
    """One run, drawn from (seed, number); the kinds take turns."""
    draw = Random(f"{seed}/{number}")
    case = KINDS[number % len(KINDS)](draw)
    staleness, pause, two = draw.randrange(3), draw.choice(["keep", "wait"]), draw.random() < 0.3
    if case.kind == "server dies for good":
        two = False
    what = f"run {number}: {case.kind}, max_staleness={staleness}, pause={pause}, {2 if two else 1} server(s)"
    late = any(fault.hang or (fault.die and not case.comes_back) for fault in case.faults)
    threads = threading.active_count()
    ended, why = "finished", ""
    if case.full:
        folder.mkdir(parents=True)
        (folder / case.full).symlink_to("/dev/full")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(model)) for _ in range(1 + two)]
        if case.comes_back:
            stack.enter_context(restarted(servers[0]))
        trainer = stack.enter_context(
            loop(
                [server.url for server in servers],
                model,
                folder,
                **options(draw.randrange(2)),
                max_staleness=staleness,
                pause=pause,
                timeout=DEADLINE_MET if late else DEADLINE,
                wait_timeout=2 * DEADLINE,
                restarts=case.restarts,
                retries=6,
                checkpoint_every=1,
                scorer=Scorer(broken if case.reward_raises else float_length),
            )
        )
        for fault in case.faults:
            servers[0].add_fault(fault)
        try:
            trainer.run()
        except Exception as error:
            ended, why = "failed", f"{type(error).__name__}: {error}"
            trainer.try_save()
        violations = [] if case.ends in ("any", ended) else [f"ended as {ended}, not {case.ends} ({why})"]
        servers[0].clear_faults()
        told = "resume" not in {fault.call for fault in case.faults}
        paused = [server.url for server in servers if server.alive and server.engine.paused is not None]
        violations += [f"{url} is left paused" for url in paused if told]
    trained = case.same and ended == "finished" and staleness == 0
    violations += check(folder, staleness, ended, unbroken.rollouts(trainer.loader.seed) if trained else None)
    if threading.active_count() > threads:
        violations.append(f"threads are left: {[thread.name for thread in threading.enumerate()]}")
    return Outcome(case.kind, ended, why, [f"{what}: {violation}" for violation in violations])


def check_ledger(metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]]) -> None:
    """Law 6. (An answer that cannot be used is booked as it arrives; its line comes with the step of its group.)"""
    for line in metrics:
        accounts = {name: line[f"tokens/{name}"] for name in ("trained", "masked", "discarded", "in_flight")}
        assert line["tokens/generated"] == sum(accounts.values()), line
        rows = [row for row in rollouts if row["step"] <= line["step"]]
        assert accounts["trained"] == sum(row["tokens"] for row in rows if row["outcome"] == "trained"), accounts
        assert accounts["discarded"] >= sum(row["tokens"] for row in rows if row["outcome"][:9] == "discarded"), (
            accounts
        )


def check(folder: Path, staleness: int, ended: str, unbroken: list[dict[str, Any]] | None) -> list[str]:
    """The laws, seen from the run folder."""
    metrics, rollouts = lines(folder, "metrics.jsonl"), lines(folder, "rollouts.jsonl")
    found = []
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, len(steps) + 1)) or (ended == "finished" and len(steps) != STEPS):
        found.append(f"steps are {steps}")
    whole = [row for row in rollouts if row["step"] <= len(steps)]  # the disk may be full between the two files
    for name, work in (
        ("ledger", lambda: check_ledger(metrics, whole)),
        ("lag", lambda: check_lag(metrics, whole, staleness)),
        ("order", lambda: whole and check_order(whole)),
    ):
        try:
            work()
        except AssertionError as error:
            found.append(f"{name}: {str(error).splitlines()[0] if str(error) else 'does not hold'}")
    if unbroken is not None and rollouts != unbroken:
        found.append("what was trained is not what an unbroken run trains")
    for saved in complete(folder / "checkpoints"):
        step = checkpoint.inspect(saved)["step"]
        if step > len(steps):
            found.append(f"a checkpoint of step {step}, {len(steps)} are recorded")
    return found


@contextlib.contextmanager
def restarted(server: FakeServer) -> Iterator[None]:
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(0.01):
            if not server.alive:
                server.restart()

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def float_length(ids: list[int]) -> float:
    return float(len(ids))


def broken(ids: list[int]) -> float:
    if len(ids) > 4:
        raise RuntimeError("the verifier broke")
    return float(len(ids))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    if path.is_symlink() or not path.exists():  # /dev/full
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
