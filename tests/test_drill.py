"""The fault drill in its short form: each kind once, with fake servers. The long one: python -m tests.drill --help."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from grpo.rollout import client, loader, revival
from tests.drill import fake_runs
from tests.drill.cases import KINDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unbroken(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_runs.Unbroken]:
    waits = [(client, "BACKOFF_FIRST"), (loader, "LOOK_EVERY")]
    waits += [(revival, name) for name in ("POLL", "NOTICED", "HEALTH_EVERY")]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in waits:
            patch.setattr(module, name, getattr(module, name))  # put back afterwards
        fake_runs.quick()
        yield fake_runs.Unbroken(tiny_dir, tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_the_laws_hold_after_a_fault(number: int, tiny_dir: Path, tmp_path: Path, unbroken: fake_runs.Unbroken) -> None:
    outcome = fake_runs.run(number, 11, tiny_dir, tmp_path / "run", unbroken)
    assert outcome.violations == []
