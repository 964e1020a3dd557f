"""A server that is gone comes back: nothing is lost, trained twice or sampled by other weights; one that stays away
ends the run. The servers are fake ones, attached (`rollout.urls`) but for the last test, which launches a process."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_faults import Fault, version
from fake_server import FakeServer
from fake_server import __file__ as fake_server_file
from loop import STARTUP, loop

from grpo.evaluate import Evaluator
from grpo.rollout import client as client_module
from grpo.rollout import loader as loader_module
from grpo.rollout import revival as revival_module
from grpo.rollout.errors import ServerError, ServersLost
from grpo.rollout.guard import descendants
from grpo.rollout.server import ServerDied, Servers, VLLMServer, free_ports
from grpo.sync.verify import SyncNotProven
from grpo.trainer import Trainer
from grpo.types import Prompt

STEPS = 4


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)
    monkeypatch.setattr(loader_module, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(revival_module, "POLL", 0.02)
    monkeypatch.setattr(revival_module, "HEALTH_EVERY", 0.0)
    monkeypatch.setattr(revival_module, "NOTICED", 30.0)  # no test waits so long: where it looks, the process has died


@contextmanager
def restarted(server: FakeServer, times: int = 1) -> Iterator[None]:
    """Somebody starts the server again as soon as it is dead, with the weights of its own files."""
    over = threading.Event()

    def supervise() -> None:
        for _ in range(times):
            while server.alive:
                if over.wait(0.005):
                    return
            server.restart()

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def check_laws(folder: Path, staleness: int) -> None:
    metrics, rollouts = lines(folder, "metrics.jsonl"), lines(folder, "rollouts.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        parts = [line[f"tokens/{name}"] for name in ("trained", "masked", "discarded", "in_flight")]
        assert line["tokens/generated"] == sum(parts)
    places = [(row["group"], row["index"]) for row in rollouts]
    assert places == [(group, index) for group in range(places[-1][0] + 1) for index in range(4)]
    assert max(row["lag"] for row in rollouts) <= staleness
    for line in metrics:  # tokens of lag 0 are of the trainer's own weights
        assert line.get("lag_0/kl", 0.0) < 1e-8


Result = tuple[list[torch.Tensor], list[dict[str, Any]]]  # parameters in the end, lines of rollouts.jsonl


def run(urls: list[str], model_dir: Path, folder: Path, **options: Any) -> Result:
    options = {"steps": STEPS, "zero_variance": "keep", "lr": 0.01, "restarts": 2, **options}
    with loop(urls, model_dir, folder, **options) as trainer:
        assert trainer.run() == "all steps made"
        parameters = [p.detach().clone() for p in trainer.step_fn.policy.parameters()]
    check_laws(folder, options.get("max_staleness", 0))
    return parameters, lines(folder, "rollouts.jsonl")


@pytest.fixture(scope="module")
def unbroken(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    with FakeServer(tiny_dir) as server:
        return run([server.url], tiny_dir, tmp_path_factory.mktemp("unbroken"))


def rollout(call: Any) -> bool:
    """Whether a request is one of training, and no probe."""
    return not str(call.body["request_id"]).startswith("sample-")


FAULTS = {
    "before an answer": Fault("generate", die=True, after=13, times=1),
    "after an answer was computed": Fault("generate", die=True, late=True, after=13, times=1),
    "pause": Fault("pause", die=True, after=2, times=1),
    "start": Fault("start_weight_update", die=True, after=2, times=1),
    "update": Fault("update_weights", die=True, after=2, times=1),
    "update, done": Fault("update_weights", die=True, late=True, after=2, times=1),
    "finish": Fault("finish_weight_update", die=True, after=2, times=1),
    "finish, done": Fault("finish_weight_update", die=True, late=True, after=2, times=1),
    "resume": Fault("resume", die=True, after=2, times=1),
    "confirm": Fault("weight_info", die=True, after=5, times=1),
    "in the first sync": Fault("update_weights", die=True, times=1),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_restart_anywhere_changes_nothing_that_is_trained(
    tiny_dir: Path, tmp_path: Path, unbroken: Result, where: str
) -> None:
    """max_staleness=0: the same completions at the same steps, and in the end the same parameters, bit for bit."""
    fault = FAULTS[where]
    with FakeServer(tiny_dir) as server, restarted(server):
        server.add_fault(fault)
        parameters, rollouts = run([server.url], tiny_dir, tmp_path / "broken")
        assert fault.hits == 1
        assert server.calls.count("init_weight_transfer_engine") == 2
    assert rollouts == unbroken[1]
    assert all(torch.equal(a, b) for a, b in zip(parameters, unbroken[0], strict=True))


def test_a_server_that_came_back_unseen_is_noticed_by_its_tokens(
    tiny_dir: Path, tmp_path: Path, unbroken: Result
) -> None:
    """It answers at once, with its base weights: no request fails, and none of its tokens is trained."""
    with FakeServer(tiny_dir) as server:
        server.add_fault(Fault("generate", edit=version("default"), when=rollout, after=17, times=1))
        _, rollouts = run([server.url], tiny_dir, tmp_path / "broken")
        assert server.calls.count("init_weight_transfer_engine") == 2
    assert rollouts == unbroken[1]
    line = lines(tmp_path / "broken", "metrics.jsonl")[-1]
    assert (line["sampler/restarts"], line["sampler/servers_out"], line["sampler/invalid_answers"]) == (1, 0, 0)


@pytest.mark.parametrize("label", ["0", "7"])
def test_tokens_of_a_version_that_the_server_should_not_have_are_sampled_again(
    tiny_dir: Path, tmp_path: Path, unbroken: Result, label: str
) -> None:
    with FakeServer(tiny_dir) as server:
        server.add_fault(Fault("generate", edit=version(label), when=rollout, after=17, times=1))
        assert run([server.url], tiny_dir, tmp_path / "broken")[1] == unbroken[1]


def test_a_restart_between_two_syncs_is_noticed_by_the_version(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=STEPS, zero_variance="keep", restarts=1) as trainer,
    ):
        during_step(trainer, 2, lambda: (server.die(), server.restart()))
        trainer.run()
        assert server.calls.count("init_weight_transfer_engine") == 2
    check_laws(tmp_path, 0)


def test_a_death_that_the_loop_notices_as_a_sync_begins(tiny_dir: Path, tmp_path: Path, unbroken: Result) -> None:
    """The trainer's thread has just looked who is in."""
    options: dict[str, Any] = {"steps": STEPS, "zero_variance": "keep", "lr": 0.01, "restarts": 1}
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, **options) as trainer:
        roster = trainer.loader.client.roster
        announce = roster.announce

        def dies_then(version: int) -> None:
            if version == 2 and roster.announced == 1:
                server.die()
                roster.exclude(server.url, "died")
                threading.Timer(0.2, server.restart).start()
            announce(version)

        roster.announce = dies_then  # type: ignore[method-assign]
        trainer.run()
    check_laws(tmp_path, 0)
    assert lines(tmp_path, "rollouts.jsonl") == unbroken[1]


def during_step(trainer: Trainer, step: int, work: Callable[[], Any]) -> None:
    inner = trainer.step_fn

    def step_fn(groups: Any, version: int) -> dict[str, float]:
        if version == step:
            work()
        return inner(groups, version)

    step_fn.__dict__.update(loss=inner.loss, policy=inner.policy, optimizer=inner.optimizer)
    trainer.step_fn = step_fn  # type: ignore[assignment]


@pytest.mark.parametrize("call", ["pause", "update_weights", "finish_weight_update", "resume"])
def test_of_two_servers_the_other_carries_on(tiny_dir: Path, tmp_path: Path, call: str) -> None:
    """The one that is left finishes the sync without sampling in between, and the lost one rejoins after a sync."""
    with FakeServer(tiny_dir) as one, FakeServer(tiny_dir) as two:
        two.add_fault(Fault(call, die=True, after=2, times=1))
        with restarted(two):
            run([one.url, two.url], tiny_dir, tmp_path / "broken", max_staleness=1, groups=4)
        paused = False
        for name in one.calls:  # an update that was begun is finished before the server may sample again
            paused = name != "resume" and (paused or name == "pause")
            assert paused or name not in ("start_weight_update", "finish_weight_update")
        again = two.calls[two.calls.index("init_weight_transfer_engine", 1) :]
        assert again.index("finish_weight_update") < again.index("generate")
        assert "generate" in again
        assert one.engine.version == two.engine.version == str(STEPS)


def test_a_server_that_stays_away_does_not_hold_up_the_other(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as one, FakeServer(tiny_dir) as two:
        two.add_fault(Fault("generate", die=True, after=9, times=1))
        run([one.url, two.url], tiny_dir, tmp_path / "broken", max_staleness=1)
        assert one.engine.version == str(STEPS)
    assert lines(tmp_path / "broken", "metrics.jsonl")[-1]["sampler/servers_out"] == 1
    assert two.url in json.loads((tmp_path / "broken" / "status.json").read_text())["servers_out"]


def test_a_server_that_stays_away_ends_the_run_by_its_deadline(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, restarts=1, reattach_timeout=1.0) as trainer,
    ):
        server.add_fault(Fault("generate", die=True, after=9, times=1))
        with pytest.raises(ServersLost, match=rf"{server.url} did not come back within rollout.reattach_timeout=1 s"):
            trainer.run()


@pytest.mark.parametrize(("restarts", "call"), [(0, "generate"), (0, "update_weights"), (1, "generate")])
def test_a_server_comes_back_so_many_times_only(tiny_dir: Path, tmp_path: Path, restarts: int, call: str) -> None:
    with (
        FakeServer(tiny_dir) as server,
        restarted(server, times=2),
        loop([server.url], tiny_dir, tmp_path, restarts=restarts, steps=20) as trainer,
    ):
        server.add_fault(Fault(call, die=True, after=12 if call == "generate" else 1, times=1))
        server.add_fault(Fault(call, die=True, after=80, times=1))
        with pytest.raises(ServersLost, match=rf"may not come back: rollout.restarts={restarts}; \d+ open request"):
            trainer.run()


def test_a_server_that_is_there_and_fails_is_not_waited_for(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, restarts=5) as trainer,
    ):
        server.add_fault(Fault("generate", status=502, after=20))
        with pytest.raises(ServersLost, match=r"given up after 3 tries.*502"):
            trainer.run()
        assert "init_weight_transfer_engine" not in server.calls[2:]


def test_a_sync_that_a_living_server_refuses_ends_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, restarts=5) as trainer:
        server.add_fault(Fault("update_weights", status=500, after=1))
        with pytest.raises(ServerError, match="update_weights: status 500"):
            trainer.run()
        assert server.engine.paused is None


def test_a_server_that_comes_back_is_proven_before_it_gets_requests(tiny_dir: Path, tmp_path: Path) -> None:
    """Also where the syncs of the run are not proven: it has just been started from files of its own."""
    options: dict[str, Any] = {"steps": STEPS, "zero_variance": "keep", "lr": 0.05, "restarts": 1, "verify_every": 0}
    with (
        FakeServer(tiny_dir) as server,
        restarted(server),
        loop([server.url], tiny_dir, tmp_path, **options) as trainer,
    ):
        server.add_fault(Fault("generate", die=True, when=rollout, after=18, times=1))
        server.add_fault(Fault("update_weights", apply="nothing", after=3))
        with pytest.raises(SyncNotProven):
            trainer.run()
        last = server.calls[server.calls.index("init_weight_transfer_engine", 1) :]
        assert last.count("generate") == 8, "the probes, and nothing else"


@pytest.mark.parametrize("after", [0, 3])
def test_a_death_within_a_proof(tiny_dir: Path, tmp_path: Path, after: int) -> None:
    """The proof is asked again of the server that came back: one that was not proven gets no requests."""

    with FakeServer(tiny_dir) as server, restarted(server):
        server.add_fault(Fault("generate", die=True, when=lambda call: not rollout(call), after=8 + after, times=1))
        run([server.url], tiny_dir, tmp_path / "broken")


def test_a_death_within_an_evaluation(tiny_dir: Path, tmp_path: Path) -> None:
    prompts = [Prompt(i, f"eval/{i}", "", [5 + i, 6], {}) for i in range(4)]
    results = []
    for faults in (0, 1):
        folder = tmp_path / str(faults)
        with (
            FakeServer(tiny_dir) as server,
            restarted(server),
            loop([server.url], tiny_dir, folder, steps=2, restarts=1, eval_every=1, verify_every=0) as trainer,
        ):
            evaluator = trainer.evaluator
            trainer.evaluator = Evaluator(
                evaluator.loader, evaluator.recorder, {"held_out": prompts}, evaluator.sampling, 2, 20.0
            )
            if faults:
                server.add_fault(Fault("generate", die=True, after=11, times=1))  # 8 probes come first
            trainer.run()
            results.append(
                [{k: v for k, v in line.items() if "time" not in k} for line in lines(folder, "evals.jsonl")]
            )
            assert server.calls.count("init_weight_transfer_engine") == 1 + faults
    assert results[0] == results[1]


# ---- servers that the run launches ----


@pytest.fixture
def launched(tiny_dir: Path, tmp_path: Path) -> Iterator[Servers]:
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, fake_server_file, "--model", str(tiny_dir), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    servers = Servers(
        [VLLMServer(command, host="127.0.0.1", port=port, environment=environment, log=tmp_path / "server.log")]
    )
    for server in servers.launched:
        server.launch()
    servers.wait_ready(STARTUP)
    yield servers
    servers.stop()


def kill(servers: Servers) -> None:
    process = servers.launched[0].process
    assert process is not None
    os.kill(descendants(process.pid)[0], signal.SIGKILL)


def test_a_launched_server_is_started_again_until_it_may_not(
    tiny_dir: Path, tmp_path: Path, launched: Servers, unbroken: Result
) -> None:
    options: dict[str, Any] = {"steps": STEPS, "zero_variance": "keep", "lr": 0.01, "restarts": 1}
    with loop(launched.urls, tiny_dir, tmp_path / "a", servers=launched, **options) as trainer:
        during_step(trainer, 1, lambda: kill(launched))
        trainer.run()
        parameters = [p.detach().clone() for p in trainer.step_fn.policy.parameters()]
    check_laws(tmp_path / "a", 0)
    assert lines(tmp_path / "a", "rollouts.jsonl") == unbroken[1]
    assert all(torch.equal(a, b) for a, b in zip(parameters, unbroken[0], strict=True))
    with loop(launched.urls, tiny_dir, tmp_path / "b", servers=launched, **(options | {"restarts": 0})) as trainer:
        during_step(trainer, 1, lambda: kill(launched))
        with pytest.raises(ServerDied, match=r"(?s)died \(signal 9\).*\d+ open request"):
            trainer.run()


def test_an_engine_that_dies_within_a_sync_does_not_wait_for_the_syncs_deadline(
    tiny_dir: Path, tmp_path: Path, launched: Servers, unbroken: Result
) -> None:
    """Its API server lives on and holds our call open: here it is stopped, and an engine of it is gone."""
    (server,) = launched.launched
    options: dict[str, Any] = {"steps": STEPS, "zero_variance": "keep", "lr": 0.01, "restarts": 1, "timeout": 3600.0}
    with loop(launched.urls, tiny_dir, tmp_path, servers=launched, **options) as trainer:
        prepare = trainer.weights.weights.prepare  # type: ignore[attr-defined]

        def stop_then_prepare(version: int) -> None:
            if version == 2 and not trainer.loader.client.roster.out and server._program:
                os.kill(server._program, signal.SIGSTOP)
                server._engines[2**22 + 1] = "VLLM::EngineCore"  # no process has this number
            prepare(version)

        trainer.weights.weights.prepare = stop_then_prepare  # type: ignore[attr-defined]
        trainer.run()
        assert trainer.loader.client.roster.returns == 1
    check_laws(tmp_path, 0)
    assert lines(tmp_path, "rollouts.jsonl") == unbroken[1]
