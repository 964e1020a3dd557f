"""The script that makes models/tiny, and the model that is shipped."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.data import arithmetic

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def make_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny", ROOT / "scripts" / "make_tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(out: Path, *arguments: str) -> str:
    command = [sys.executable, "scripts/make_tiny.py", "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_tokenizer_has_one_id_a_character(make_tiny: ModuleType, tmp_path: Path) -> None:
    make_tiny.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(make_tiny.CHARACTERS)["input_ids"]
    assert len(set(ids)) == len(ids) == len(make_tiny.CHARACTERS) == len(tokenizer) - 3
    assert tokenizer.decode(ids) == make_tiny.CHARACTERS
    assert tokenizer.decode(tokenizer("12 = a , b")["input_ids"]) == "12 = a , b"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("7~<eos>")["input_ids"] == [ids[7], tokenizer.unk_token_id, tokenizer.eos_token_id]
    assert tokenizer.bos_token_id is None


def test_warm_start_draws_no_held_out_problem(make_tiny: ModuleType) -> None:
    # Drawn from all problems, 20,000 would hold about 20 held-out ones.
    problems = make_tiny.draw_problems(20_000, torch.Generator().manual_seed(3))
    held_out = {row["problem"] for row in arithmetic.held_out_rows(1024)}
    assert len(set(problems)) > 19_000
    assert not held_out & set(problems)


@pytest.mark.parametrize(("thinking", "completions"), [(False, [":4", ":1"]), (True, ["750324:4", "000001:1"])])
def test_loss_counts_completion_and_end_token_only(
    make_tiny: ModuleType, thinking: bool, completions: list[str]
) -> None:
    tokenizer = make_tiny.build_tokenizer()
    model = make_tiny.build_model(tokenizer, tied=False, seed=0)
    problems = ["785392", "000001"]
    expected = 0.0
    for problem, completion in zip(problems, completions, strict=True):
        ids = tokenizer(f"{problem}={completion}")["input_ids"] + [tokenizer.eos_token_id]
        logprobs_LV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= sum(logprobs_LV[place - 1, ids[place]].item() for place in range(7, len(ids)))
    loss = make_tiny.completion_loss(model, tokenizer, problems, thinking=thinking)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_teacher_shows_its_work_in_the_asked_share(make_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tiny.build_tokenizer()
    model = make_tiny.build_model(tokenizer, tied=False, seed=0)
    calls: list[tuple[int, bool]] = []

    def record(model: Any, tokenizer: Any, problems: list[str], *, thinking: bool) -> torch.Tensor:
        calls.append((len(problems), thinking))
        return sum(p.sum() for p in model.parameters())

    monkeypatch.setattr(make_tiny, "completion_loss", record)
    make_tiny.train(model, tokenizer, steps=2, batch_size=20, thinking_share=0.3, lr=1e-4, seed=0)
    assert calls == [(6, True), (14, False)] * 2


@pytest.mark.slow
def test_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run_script(tmp_path / name, "--steps", "3", "--batch-size", "16")
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    assert "model.safetensors" in digests(tmp_path / "first")


@pytest.mark.slow
def test_tied_variant_from_a_seed(make_tiny: ModuleType, tmp_path: Path) -> None:
    printed = run_script(tmp_path, "--tied", "--seed", "1", "--steps", "1", "--batch-size", "4")
    assert "sampled  held-out accuracy" in printed
    assert "greedy   held-out accuracy" in printed
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    # The one step has learning rate 3e-3 / 50, which moves a weight by 6e-5, so the seed still shows.
    start = make_tiny.build_model(make_tiny.build_tokenizer(), tied=True, seed=1)
    torch.testing.assert_close(weights["model.embed_tokens.weight"], start.lm_head.weight.detach(), atol=1e-4, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_seed_decides_the_weights(make_tiny: ModuleType) -> None:
    tokenizer = make_tiny.build_tokenizer()
    first, again, other = (make_tiny.build_model(tokenizer, tied=False, seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_shipped_model_guesses_often_and_thinks_well(make_tiny: ModuleType) -> None:
    """The premise of the default run: there is something to learn, and it can be learned by thinking more."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer.get_vocab() == make_tiny.build_tokenizer().get_vocab()
    assert model.dtype == torch.float32
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.num_parameters() == 439_040
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 5_000_000

    rows = list(arithmetic.held_out_rows()) * 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        completions = make_tiny.complete(model, tokenizer, [row["problem"] for row in rows], greedy=False)
    right = [arithmetic.given_answer(c) == row["answer"] for c, row in zip(completions, rows, strict=True)]
    thought = [not completion.startswith(":") for completion in completions]
    right_thinking = [r for r, t in zip(right, thought, strict=True) if t]
    # n = 1024, so one standard error is 0.015.
    assert 0.2 < sum(right) / len(right) < 0.45
    assert 0.25 < sum(thought) / len(thought) < 0.36
    assert sum(right_thinking) / len(right_thinking) > 0.95
    assert max(map(len, completions)) < 32
    assert 3 < sum(map(len, completions)) / len(completions) < 5
