"""The synchronous oracle: GRPO as a plain loop, written again without anything of the framework's loop.

One request after the other, one sequence after the other through transformers' own forward pass, the loss of the PPO
paper written out, torch's AdamW, the weights saved and loaded by the server's calls. What the framework does with
max_staleness=0 must end in the same parameters.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def post(url: str, path: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
    data = json.dumps(body if body is not None else {}).encode()
    address = url + path + ("?" + urlencode(query) if query else "")
    request = Request(address, data=data, headers={"Content-Type": "application/json"}, method="POST")
    with urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")  # type: ignore[no-any-return]


def synchronous_grpo(
    url: str,
    model_dir: Path,
    scratch: Path,
    *,
    prompts: Callable[[int], list[int]],
    reward: Callable[[list[int]], float],
    steps: int,
    groups: int,
    group_size: int,
    max_tokens: int,
    temperature: float,
    stop_ids: list[int],
    lr: float,
    seed: int,
    clip: tuple[float, float] = (0.2, 0.28),
) -> tuple[dict[str, torch.Tensor], list[list[list[int]]]]:
    """Parameters after the last step, and the completions' ids by step."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=lr, weight_decay=0.0, fused=True)
    history: list[list[list[int]]] = []
    group = 0
    send(url, model, scratch / "0.safetensors", 0)
    for step in range(steps):
        rows: list[tuple[list[int], list[int], list[float], float]] = []
        while len({id(r) for r in rows}) < groups * group_size:
            prompt = prompts(group)
            answers = [
                ask(url, prompt, own_seed(seed, group, i), max_tokens, temperature, stop_ids) for i in range(group_size)
            ]
            group += 1
            rewards = torch.tensor([reward(ids) for ids, _ in answers], dtype=torch.float64)
            if rewards.max() == rewards.min():
                continue
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            rows += [(prompt, ids, lps, float(a)) for (ids, lps), a in zip(answers, advantages, strict=True)]
        history.append([ids for _, ids, _, _ in rows])
        total = sum(len(ids) for _, ids, _, _ in rows)
        loss = torch.zeros((), dtype=torch.float64)
        for prompt, ids, sampled, advantage in rows:
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
            new = logits.log_softmax(-1)[torch.arange(len(ids)), ids].double()
            ratio = (new - torch.tensor(sampled, dtype=torch.float32).double()).exp()
            bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
            loss = loss - torch.minimum(ratio * advantage, bounded * advantage).sum() / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        send(url, model, scratch / f"{step + 1}.safetensors", step + 1)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, history


def own_seed(seed: int, group: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def ask(
    url: str, prompt: list[int], seed: int, max_tokens: int, temperature: float, stop_ids: list[int]
) -> tuple[list[int], list[float]]:
    params = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "logprobs": 0,
        "stop_token_ids": stop_ids,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }
    answer = post(url, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})["choices"][0]
    return answer["token_ids"], [entry["logprob"] for entry in answer["logprobs"]["content"]]


def send(url: str, model: torch.nn.Module, file: Path, version: int) -> None:
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, file)
    if version == 0:
        post(url, "/init_weight_transfer_engine", {"init_info": {}})
    post(url, "/pause", mode="keep", clear_cache="true")
    post(url, "/start_weight_update")
    post(url, "/update_weights", {"update_info": {"path": str(file)}})
    post(url, "/finish_weight_update", {"weight_version": str(version)})
    post(url, "/resume")
