"""Texts that a run does not choose: an error's message with half of a character, control codes and a megabyte."""

from pathlib import Path

import command
import pytest
from fake_server import FakeServer

REWARD = """
def score(prompt, completion, answer, **columns):
    raise RuntimeError("</script>\\x00\\x1b[31m half of a character \\ud800 " + "x" * 1_000_000)
"""


@pytest.mark.slow
def test_an_error_of_any_text_ends_a_run_as_every_error_does(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    overrides = [o for o in command.small(server) if not o.startswith("data.reward")]
    given = f"data.reward={tmp_path / 'mine.py'}:score"
    ended = command.run(*overrides, given, "hydra.run.dir=run", folder=tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert ended.returncode == 1, ended.stderr[-2000:]
    for said in (ended.stdout, ended.stderr):
        assert len(said) < 200_000
        assert "Logging error" not in said
    assert "error: RewardError" in ended.stderr
    assert "state" in ended.stdout  # the closing table
    status = command.load(tmp_path / "run" / "status.json")
    assert status["state"] == "failed"
    assert "\ud800" in status["error"]["message"]
    assert len(status["error"]["traceback"]) < 200_000
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "the run failed" in log
    assert "half of a character \\ud800" in log
    assert (tmp_path / "run" / "report.html").stat().st_size < 3_000_000
