"""What `multi_gpu.sh` calls: makes the model and the data of its runs, kills an engine in mid-sync, reads the runs.

python benchmarks/multi_gpu.py prepare FOLDER [--tiny]
python benchmarks/multi_gpu.py fault FOLDER --limit SECONDS -- overrides of run.py ...
python benchmarks/multi_gpu.py table FOLDER [--tiny]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import measure
import torch
from end_to_end import PROMPT, make_prompts
from serving import ROOT, make_model

from grpo.rollout.guard import descendants, title
from grpo.rollout.server import free_ports

STEPS, SKIP = 10, 3  # steps of a run, and those at its start that are not counted
POLL = 0.01  # seconds
COLUMNS = {
    "s/step": "time/step_s",
    "waiting s": "time/wait_rollouts_s",
    "training s": "time/train_s",
    "sync s": "time/sync_s",
    "paused s": "sync/paused_s",
    "sampler idle": "sampler/idle_fraction",
    "peak GB": "memory/peak_gb",
}


def prepare(folder: Path, tiny: bool) -> None:
    """model/, prompts.jsonl and overrides.txt: the settings that all runs share, one a line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, length, new, prompts, group = ("tiny", 20, 16, 4, 4) if tiny else ("4b", PROMPT, 512, 16, 8)
    model, data = folder / "model", folder / "prompts.jsonl"
    make_model(shape, model, device)
    make_prompts(data, 512, length)
    reward = f"data.reward=[{{kind: python, path: '{ROOT / 'benchmarks' / 'end_to_end.py'}:noise', workers: 4}}]"
    overrides = [
        *("model=_base", f"model.path={model}", f"model.dtype={'float32' if tiny else 'bfloat16'}", "model.lr=1e-6"),
        *("loss=ppo_clip", "data=jsonl", f"data.path={data}", "data.answer=null", "data.eval_rows=0"),
        *("data.template=plain", reward, f"data.max_prompt_tokens={length}", f"data.max_tokens={new}"),
        *(f"rollout.group_size={group}", "rollout.zero_variance=keep", f"train.batch_size={prompts * group}"),
        *(f"train.steps={STEPS}", "train.eval_every=0", "train.checkpoint_every=0", "sync.verify_every=5"),
        *(f"train.tokens_per_microbatch={256 if tiny else 16384}", f"model.checkpointing={'none' if tiny else 'full'}"),
    ]
    (folder / "overrides.txt").write_text("\n".join(overrides) + "\n")


def fault(folder: Path, limit: float, overrides: list[str]) -> None:
    """A run whose server's engine gets SIGKILL while generation is paused for a sync, which is when weights change."""
    run = folder / "fault"
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "run.py", *overrides, f"rollout.port={port}", f"hydra.run.dir={run}"]
    started = time.monotonic()
    with (folder / "fault_run.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    killed = None
    while process.poll() is None and time.monotonic() - started < 1500:
        if killed is None and len(read(run / "metrics.jsonl")) >= 2 and paused(port):
            engines = [pid for pid in descendants(process.pid) if title(pid).startswith("VLLM::EngineCore")]
            os.kill(engines[0], signal.SIGKILL)
            killed, at = time.monotonic(), len(read(run / "metrics.jsonl"))
            print(f"killed {engines[0]} in the sync after step {at}", flush=True)
        if killed is not None and time.monotonic() - killed > limit:
            process.kill()
            print(f"HANGS: {limit:g} s after the kill the run has not ended", flush=True)
            process.wait()
            sys.exit(1)
        time.sleep(POLL)
    if killed is None:
        process.kill()
        sys.exit("the run ended, or took too long, before a sync was seen")
    status = json.loads((run / "status.json").read_text())
    steps = len(read(run / "metrics.jsonl"))
    error = (status.get("error") or {}).get("message", "")
    print(
        f"{status['state']} {time.monotonic() - killed:.0f} s later with {steps} of {STEPS} steps, exit "
        f"{process.returncode} {error[:300]}"
    )


def paused(port: int) -> bool:
    """Whether the run's server says so."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/is_paused", timeout=5) as answer:
        return bool(json.load(answer)["is_paused"])


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def laws(metrics: list[dict[str, Any]], staleness: int, probe_bound: float) -> list[str]:
    """What is broken."""
    wrong = []
    for line in metrics:
        settled = sum(line[f"tokens/{account}"] for account in ("trained", "masked", "discarded", "in_flight"))
        if line["tokens/generated"] != settled:
            wrong.append(f"ledger at step {line['step']}")
        if line["lag/max"] > staleness:
            wrong.append(f"lag {line['lag/max']} at step {line['step']}")
        if line.get("sync/probe_mean", 0.0) > probe_bound:
            wrong.append(f"probe {line['sync/probe_mean']:.3g} at step {line['step']}")
    return wrong


def table(folder: Path, tiny: bool) -> int:
    rows, failed = [], 0
    for run in sorted(p.parent for p in folder.glob("*/status.json")):
        if run.name == "fault":
            continue
        metrics, status = read(run / "metrics.jsonl"), json.loads((run / "status.json").read_text())
        staleness = next(
            int(text.partition("=")[2]) for text in status["overrides"] if text.startswith("rollout.max_staleness=")
        )
        row: dict[str, Any] = {"run": run.name, "state": status["state"], "ranks": status.get("ranks", 1)}
        if len(metrics) > SKIP:
            first, last = metrics[SKIP - 1], metrics[-1]
            span = last["time/elapsed_s"] - first["time/elapsed_s"]
            row["tokens/s"] = (last["tokens/trained"] - first["tokens/trained"]) / span
            row |= {
                name: statistics.mean(line.get(key, 0.0) for line in metrics[SKIP:]) for name, key in COLUMNS.items()
            }
            row["sync s/GB"] = row["sync s"] / (last["sync/bytes"] / 1e9)
            row["trainer idle"] = row["waiting s"] / (span / len(metrics[SKIP:]))
        broken = laws(metrics, staleness, 1e-4 if tiny else 0.1)
        row["laws"] = "; ".join(broken[:2]) or "kept"
        failed += status["state"] != "finished" or bool(broken)
        rows.append(row)
    columns = dict.fromkeys(key for row in rows for key in row if key != "laws") | {"laws": None}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measure.write(folder / "multi_gpu.json", {**measure.environment(device), "rows": rows})
    print(measure.table([columns | row for row in rows]))
    for name in ("ranks.log", "fault.log", "not_run.txt"):
        if (folder / name).exists():
            print(f"--- {name}\n{(folder / name).read_text().rstrip()}")
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "fault", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.folder, options.tiny)
    elif options.what == "fault":
        fault(options.folder, options.limit, options.overrides)
    else:
        sys.exit(table(options.folder, options.tiny))


if __name__ == "__main__":
    main()
