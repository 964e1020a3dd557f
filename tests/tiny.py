"""Tiny random Qwen3 models with a character tokenizer, written to a folder as transformers and vLLM load them.

Left out on purpose: anything learned. The weights are random but wide (`std`), so that the next-token distribution is
far from uniform and a wrong position, temperature or weight shows up as a large difference in logprobs.

The vocabulary is `<pad>`, `<eos>`, the characters of CHARACTERS, then the MERGED pieces: "hello" encodes to the one
piece, while a sampler may well emit "he" + "llo". So text that was sampled does not encode to what was sampled.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*/=:;.,?! ()abcdefghijklmnopqrstuvwxyz\n"
MERGED = {"he": ("h", "e"), "ll": ("l", "l"), "llo": ("ll", "o"), "hello": ("he", "llo")}


def tiny_tokenizer(*, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """One id per character, plus the MERGED pieces. `pad_is_eos`: the pad token is the end token, as in SmolLM2."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS, *MERGED])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(MERGED.values())))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS if pad_is_eos else PAD)


def tiny_model(
    *, vocab_size: int, eos_id: int = 1, tied: bool = False, seed: int = 0, max_length: int = 512, std: float = 0.3
) -> Qwen3ForCausalLM:
    """A two-layer Qwen3 in float32 with weights drawn from `seed`; the caller's random state stays as it was."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on the CPU takes 32 and more
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # ones by default: a norm that an update forgets would go unseen
                    parameter += 0.2 * torch.randn_like(parameter)
        return model


def save_tiny_model(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    max_length: int = 512,
    pad_is_eos: bool = False,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write model and tokenizer to `folder` and return it.

    `generation_config` (for example `{"repetition_penalty": 1.1, "top_k": 20}`) is added to generation_config.json:
    sampling defaults that a server may take from the model's folder.
    """
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos)
    eos_id = tokenizer.eos_token_id
    assert isinstance(eos_id, int)
    model = tiny_model(vocab_size=len(tokenizer), eos_id=eos_id, tied=tied, seed=seed, max_length=max_length)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    defaults = {"eos_token_id": eos_id, "pad_token_id": tokenizer.pad_token_id, **(generation_config or {})}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


def other_weights(folder: Path, file: Path, *, seed: int = 1, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Save the weights of the same model drawn from another seed to `file` (safetensors) and return them.

    Names are those of transformers' `state_dict`; a tied head is left out, as `save_pretrained` does.
    """
    config = Qwen3Config.from_pretrained(folder)
    model = tiny_model(
        vocab_size=config.vocab_size,
        tied=config.tie_word_embeddings,
        seed=seed,
        max_length=config.max_position_embeddings,
    )
    tied_head = "lm_head.weight" if config.tie_word_embeddings else None
    weights = {k: v.contiguous() * scale for k, v in model.state_dict().items() if k != tied_head}
    save_file(weights, file)
    return weights


def reference_logprobs(
    folder: Path,
    ids: list[int],
    start: int,
    temperature: float = 1.0,
    weights: dict[str, torch.Tensor] | None = None,
) -> list[float]:
    """Logprobs of `ids[start:]` under the model of `folder` (with other `weights`), by one full forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logprobs_TV = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(logprobs_TV[t - 1, ids[t]]) for t in range(start, len(ids))]
