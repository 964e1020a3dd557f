"""A model whose attention heads vLLM has no kernel for on a CPU is refused before anything is started."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from composed import ROOT, composed

from grpo import preflight
from grpo.rollout import heads

QWEN = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4}


def test_the_sizes_are_read_from_vllm() -> None:
    sizes = heads.cpu_head_sizes()
    assert {32, 64, 128} <= set(sizes)
    assert 16 not in sizes


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (QWEN, 16),
        ({**QWEN, "head_dim": 32}, 32),
        ({**QWEN, "head_dim": None}, 16),
        ({}, None),
        ({**QWEN, "num_attention_heads": 0}, None),
    ],
)
def test_the_size_of_a_head(config: dict[str, object], size: int | None) -> None:
    assert heads.head_size(config) == size


def with_heads(folder: Path, **keys: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN, **keys}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def test_a_head_that_the_cpu_has_not_is_named_with_its_key(tmp_path: Path) -> None:
    cfg = composed(f"model.path={with_heads(tmp_path, head_dim=16)}", "model.device=cpu")
    with pytest.raises(ValueError, match=r"^model\.path=.*size 16 \(head_dim in its config\.json\).* 32, 64, 80"):
        preflight.check(cfg, ROOT)


def test_servers_that_run_elsewhere_have_their_own_say(tmp_path: Path) -> None:
    cfg = composed(f"model.path={with_heads(tmp_path)}", "model.device=cpu", "rollout.urls=['http://there:1']")
    preflight.check(cfg, ROOT)


@pytest.mark.parametrize("source", [None, "def get_supported_head_sizes(): return sizes()", "def (", "x = [32]"])
def test_an_unknown_vllm_has_its_own_say(source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if source is not None:
        file = tmp_path / heads.BACKEND
        file.parent.mkdir(parents=True)
        file.write_text(source)
    spec = ModuleSpec("vllm", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(heads, "find_spec", lambda name: spec if source is not None else None)
    assert heads.cpu_head_sizes() == []
    heads.check_heads(QWEN, "somewhere")
