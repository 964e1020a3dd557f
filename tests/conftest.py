"""Fixtures that several test files use. A test that changes a model folder makes its own (`tiny.save_tiny_model`)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest
import torch
from fake_server import FakeServer
from tiny import save_tiny_model
from transformers.utils import logging as transformers_logging

hypothesis.settings.register_profile("patient", deadline=None)  # no test asserts wall-clock time
hypothesis.settings.load_profile("patient")
transformers_logging.disable_progress_bar()
torch.set_num_threads(1)  # several tests run beside each other; tiny tensors gain nothing from threads


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied model with its tokenizer. Read only."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings. Read only."""
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def server(tiny_dir: Path) -> Iterator[FakeServer]:
    """A fake server around `tiny_dir`, without faults."""
    with FakeServer(tiny_dir) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for blocking calls that a test leaves open."""
    with ThreadPoolExecutor(64) as pool:
        yield pool
