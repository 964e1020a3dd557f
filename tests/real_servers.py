"""Fixtures: one real vLLM server for each tiny model, for the whole session.

A start costs 10 to 25 s, so tests share servers. They may: whoever uses one begins with a sync, which sets the weights,
the version and the caches (test_e2e.py shows that a run on a used server gives what it gave before). The models'
folders carry sampling defaults that must never be in force (CASES 3).

A test file says `pytest_plugins = ["real_servers"]` and imports nothing from here (pytest imports it, once).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real import CONTEXT, STARTUP, RealServer, launch
from tiny import save_tiny_model

SAMPLING_DEFAULTS = {"do_sample": True, "repetition_penalty": 1.1, "top_k": 20}


@pytest.fixture(scope="session")
def untied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    yield from serve(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    yield from serve(tmp_path_factory.mktemp("tied"), tied=True)


def serve(folder: Path, *, tied: bool) -> Iterator[RealServer]:
    model = save_tiny_model(folder / "model", tied=tied, max_length=CONTEXT, generation_config=SAMPLING_DEFAULTS)
    server = launch(model, log=folder / "server.log")
    try:
        server.wait_ready(STARTUP)
        yield RealServer(server.url, model, tied)
        server.check()  # still alive: no test has killed it unseen
    finally:
        server.stop()
