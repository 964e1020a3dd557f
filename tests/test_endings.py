"""What a run that fails leaves behind, around a fake server: whole steps, and a checkpoint of them."""

import json
from pathlib import Path

import pytest
from fake_faults import Fault
from fake_server import FakeServer
from loop import loop
from plain_http import call

from grpo import checkpoint
from grpo.rollout.errors import ServerError


def test_a_step_whose_sync_fails_is_recorded_and_saved(tiny_dir: Path, tmp_path: Path) -> None:
    """A dead server is mostly noticed by the sync: the optimizer has stepped by then, and hours may hang on it."""
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url], tiny_dir, tmp_path, steps=4, max_staleness=1, checkpoint_every=100, zero_variance="keep"
        ) as trainer,
    ):
        server.add_fault(Fault("update_weights", status=500, after=2))  # versions 0 and 1 arrive, 2 does not
        with pytest.raises(ServerError, match="update_weights"):
            trainer.run()
        trainer.try_save()
        trained = trainer.ledger.accounts()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in steps] == [(1, 0), (2, 1)]
    assert steps[-1]["tokens/trained"] == trained["trained"]
    progress = checkpoint.load(checkpoint.find(tmp_path))["progress"]
    assert progress == {"step": 2, "version": 2, "groups": 4, "places": 4, "ledger": trained}


def test_a_failed_sync_resumes_the_server_over_a_connection_that_breaks(tiny_dir: Path, tmp_path: Path) -> None:
    """As vLLM's do after each 500."""
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=2) as trainer:
        server.add_fault(Fault("update_weights", status=500, after=1, times=1))
        server.add_fault(Fault("resume", drop=True, after=1, times=1))
        with pytest.raises(ServerError, match="update_weights"):
            trainer.run()
        assert not server.engine.paused


def test_an_update_left_open_is_closed_over_a_connection_that_breaks(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1) as trainer:
        assert call(server.url, "/start_weight_update")[0] == 200
        server.add_fault(Fault("update_weights", drop=True, times=1))
        server.add_fault(Fault("start_weight_update", drop=True, after=1, times=1))
        trainer.run()
        assert server.engine.version == "1"
