"""Every mistake that can be seen before a model is loaded, in one line each, within seconds.

`check` builds the settings (which check themselves), then looks at how they fit together and at what the machine has.
It touches no model: of a hub model it reads config.json.
"""

import copy
import json
import os
import re
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo import checksums, distributed
from grpo.budget import Budget, plan_memory
from grpo.checkpoint_folder import complete
from grpo.objects import build, build_loss
from grpo.rollout import kept
from grpo.rollout.heads import check_heads
from grpo.rollout.server import check_port
from grpo.settings import Model, Rollout, Sync, Train

HUB_TIMEOUT = 3  # seconds for a hub to answer
CONNECT_TIMEOUT = 2  # seconds for a server's port
ROOT_KEYS = {
    "seed": (int, "a whole number from 0 to 4294967295"),
    "name": (str, "a name"),
    "mode": (str, "train or eval"),
    "dry_run": (bool, "true or false"),
    "resume_force": (bool, "true or false"),
    "fail_fast": (bool, "true or false"),
    "gpus_per_job": (int, "a whole number, at least 1"),
}
GROUPS = ("train", "model", "data", "rollout", "loss", "sync", "track")

# What a model directory holds, each in one of these forms.
MODEL_FILES = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"),
}


@dataclass(slots=True)
class Plan:
    """What will be run. `data`, `loss` and `mirror` are the built objects, `sync_backend` what `auto` has become.
    `evaluating`: mode=eval, no training. `place`: this process among the trainer's, if it has several."""

    train: Train
    model: Model
    rollout: Rollout
    sync: Sync
    data: Any
    loss: Any
    mirror: Any
    model_path: str
    model_config: dict[str, Any]
    device: str
    sync_backend: str
    sync_reason: str
    context: int
    groups_per_step: int
    evaluating: bool
    place: distributed.Place | None
    memory: Budget | None = None

    def lines(self) -> list[str]:
        """The plan, for people."""
        train, rollout = self.train, self.rollout
        if self.evaluating:
            work = [f"evaluate  {train.eval_samples} sample(s) a prompt at temperature {train.eval_temperature:g}"]
        else:
            work = [
                f"batch     {train.batch_size} completions = {self.groups_per_step} groups a step, "
                f"{train.minibatches} optimizer step(s) each; {train.steps} steps, lr {self.model.lr:g}",
                f"loss      {type(self.loss).__name__}: advantage {self.loss.advantage}, {self.loss.aggregation}",
            ]
        where = ", ".join(rollout.urls) if rollout.urls else f"{rollout.servers} launched on {rollout.host}"
        return [
            f"model     {self.model_path} ({self.model_config.get('model_type')}, {self.model.dtype}) on {self.device}"
            + (f", sharded over {self.place.ranks} ranks" if self.place else "")
            + ("" if self.evaluating else self.model.adapters()),
            f"data      {type(self.data).__name__}: prompt <= {self.data.max_prompt_tokens} + completion <= "
            f"{self.data.max_tokens} tokens, context {self.context}",
            f"rollout   {where}; groups of {rollout.group_size}, max_staleness {rollout.max_staleness}, "
            f"<= {rollout.max_inflight} requests open",
            *work,
            f"sync      {self.sync_backend} ({self.sync_reason}), pause {self.sync.pause}, "
            f"proven every {self.sync.verify_every} syncs",
            *([self.memory.line()] if self.memory is not None else []),
        ]


def check(cfg: DictConfig, root: Path) -> Plan:
    """Raises ValueError with one line that names key, value and what would be right."""
    cfg = copy.deepcopy(cfg)  # what is saved keeps its interpolations
    check_root(cfg, root)
    train = build(cfg.train, "train", Train)
    model = build(cfg.model, "model", Model)
    rollout = build(cfg.rollout, "rollout", Rollout)
    sync = build(cfg.sync, "sync", Sync)
    check_batch(train, model, rollout)
    data: Any = build(cfg.data, "data", object)
    if not hasattr(data, "load"):
        raise ValueError(f"data._target_={cfg.data._target_}: makes a {type(data).__name__}, which is no data set")
    mirror = build(cfg.track, "track", object)
    check_track(cfg.track)
    data.check()
    if cfg.mode == "eval":
        check_evaluation(cfg, data)
    path = resolve_model(model.path, root)
    config = read_config(path)
    check_bytes(path)
    context = int(config.get("max_position_embeddings") or 0)
    needed = data.max_prompt_tokens + data.max_tokens
    if context and needed > context:
        raise ValueError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} + data.max_tokens={data.max_tokens} = {needed} is longer "
            f"than the model's context of {context} (max_position_embeddings of {path})"
        )
    check_server(rollout)
    check_folder(sync.dir)
    # From here on torch is imported, which takes longer than all of the above.
    loss = build_loss(cfg.loss)
    check_overlong(loss, data)
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size={rollout.group_size}: loss.advantage={loss.advantage} compares the completions of a "
            "group; use 2 or more"
        )
    device = resolve_device(model.device)
    if device == "cpu" and not rollout.urls:
        check_heads(config, path)
    here = distributed.place()
    backend, reason = resolve_sync(sync, rollout, device, here.local_ranks if here else 1)
    if cfg.mode != "eval":
        check_lora(model, here)
    distributed.check_plan(
        mode=cfg.mode, batch_size=train.batch_size, minibatches=train.minibatches, device=device, backend=backend
    )
    memory = None
    if cfg.mode != "eval":
        memory = plan_memory(
            config,
            model,
            rollout,
            microbatch=train.tokens_per_microbatch,
            reference=loss.needs_reference,
            device=device,
            backend=backend,
        )
    if memory is not None:
        memory.check(model)
    return Plan(
        train=train,
        model=model,
        rollout=rollout,
        sync=sync,
        data=data,
        loss=loss,
        mirror=mirror,
        model_path=path,
        model_config=config,
        device=device,
        sync_backend=backend,
        sync_reason=reason,
        context=context,
        groups_per_step=train.batch_size // rollout.group_size,
        evaluating=cfg.mode == "eval",
        place=here,
        memory=memory,
    )


def check_root(cfg: DictConfig, root: Path) -> None:
    """What concerns no group alone: every value is there and resolves (in place), no key that nobody reads."""
    try:
        for group in GROUPS:
            if not isinstance(cfg.get(group), DictConfig) or "_target_" not in cfg[group]:
                raise ValueError(f"{group}: does not say what to build{_choices(root, group)}")
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise ValueError(f"{missing[0]}: no value; give {missing[0]}=<value>")
        text = OmegaConf.to_yaml(cfg)
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    for key in map(str, cfg):
        if key not in (*ROOT_KEYS, *GROUPS, "resume") and f"${{{key}" not in text:
            raise ValueError(f"{key}={cfg[key]}: no such key, and no other value refers to it")
    for key, (kind, expected) in ROOT_KEYS.items():
        if not isinstance(cfg[key], kind) or (kind is int and isinstance(cfg[key], bool)):
            raise ValueError(f"{key}={cfg[key]!r}: expected {expected}")
    if not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed={cfg.seed}: expected {ROOT_KEYS['seed'][1]}")
    if cfg.mode not in ("train", "eval"):
        raise ValueError(f"mode={cfg.mode!r}: expected {ROOT_KEYS['mode'][1]}")
    if not re.fullmatch(r"[\w.+=,-]+", cfg.name) or cfg.name.startswith("."):
        raise ValueError(f"name={cfg.name!r}: it becomes part of a folder's name; letters, digits and . _ - + = , only")


def _choices(root: Path, group: str) -> str:
    names = sorted(p.stem for p in (root / "conf" / group).glob("[!_]*.yaml"))
    return f"; choose {group}=<one of {', '.join(names)}>" if names else ""


def check_evaluation(cfg: DictConfig, data: Any) -> None:
    """What mode=eval alone asks for."""
    if cfg.resume is not None:
        raise ValueError(
            f"resume={cfg.resume}: mode=eval has nothing to go on with; to evaluate that run: model.path={cfg.resume}"
        )
    if getattr(data, "eval_rows", 1) == 0:
        raise ValueError("data.eval_rows=0: mode=eval has nothing to evaluate; give the rows of each held-out set")


def check_batch(train: Train, model: Model, rollout: Rollout) -> None:
    """How the sizes fit together."""
    if train.batch_size % rollout.group_size:
        raise ValueError(
            f"train.batch_size={train.batch_size} is not a multiple of rollout.group_size={rollout.group_size}: "
            f"try {max(1, round(train.batch_size / rollout.group_size)) * rollout.group_size}"
        )
    if train.minibatches > train.batch_size:
        raise ValueError(f"train.minibatches={train.minibatches}: more than train.batch_size={train.batch_size}")
    if model.schedule == "cosine" and model.warmup_steps >= train.steps * train.minibatches:
        raise ValueError(
            f"model.warmup_steps={model.warmup_steps}: the run has {train.steps * train.minibatches} optimizer steps "
            "(train.steps * train.minibatches), which leaves none for model.schedule=cosine"
        )


def check_lora(model: Model, here: distributed.Place | None) -> None:
    """Whether this run can train adapters; their targets are looked for in the model itself, when it is loaded."""
    if model.lora_rank and here:
        raise ValueError(
            f"model.lora_rank={model.lora_rank} under torchrun ({here.ranks} ranks): adapters are trained by one "
            "process; run it without torchrun, or set model.lora_rank=0"
        )


def check_overlong(loss: Any, data: Any) -> None:
    """The length of a completion may lower its reward once: by a reward of the data's, or by the loss's penalty."""
    if not loss.overlong_share:
        return
    rewards = data.rewards()
    for part in getattr(rewards, "parts", {"": rewards}).values():  # a mixture has rewards by part
        for reward in getattr(part, "rewards", ()):
            if "overlong" in (reward.KIND, reward.name):  # the penalty is recorded under this name
                raise ValueError(
                    f"data.reward[{reward.name}] with loss.overlong_share={loss.overlong_share:g}: a long completion "
                    "would be punished twice; set loss.overlong_share=0, or leave that reward out"
                )


def check_bytes(path: str) -> None:
    """A checkpoint of ours must still be what was written. The optimizer's state in it is of no use here."""
    state, record = "trainer.pt", Path(path) / checksums.NAME
    try:
        if record.is_file() and state in record.read_text(encoding="utf-8"):  # else it is another model's own
            checksums.check(Path(path), but=(state,))
    except (OSError, ValueError) as error:
        meant = f"; if it was changed on purpose, remove {record.name} there"
        raise ValueError(f"model.path={path}: the checkpoint is damaged: {error}{meant}") from error


def resolve_model(path: str, root: Path) -> str:
    """A local directory (given from where the user stands, or from the repository), else a hub id.

    Of a run folder, its newest checkpoint.
    """
    for candidate in (Path(path).expanduser(), root / path):
        if candidate.is_dir():
            if (candidate / ".hydra").is_dir() or (candidate / "checkpoints").is_dir():
                candidate = newest_checkpoint(candidate)
            for what, patterns in MODEL_FILES.items():
                if not any(found for pattern in patterns for found in candidate.glob(pattern)):
                    raise ValueError(f"model.path={path}: no {what} in {candidate}; it is no model directory")
            return str(candidate.resolve())
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ValueError(f"model.path={path}: no such directory, and no hub id (owner/name) either")
    return path


def newest_checkpoint(run: Path) -> Path:
    """Raises ValueError when the run has none."""
    found = complete(run / "checkpoints")
    if not found:
        raise ValueError(f"model.path={run}: a run folder without a checkpoint (no checkpoints/step_*)")
    return found[-1]


def read_config(path: str) -> dict[str, Any]:
    """The model's config.json; of a hub model from the cache or the hub, never its weights."""
    file = Path(path) / "config.json"
    if not file.is_file():
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        try:
            if not isinstance(cached, str):
                # The download tries again for half a minute, or for six where nothing answers; this asks once.
                HfApi().model_info(path, timeout=HUB_TIMEOUT)
                cached = hf_hub_download(path, "config.json")
        except Exception as error:  # a dozen kinds: no network, no such model, gated, offline
            why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"model.path={path}: neither in the cache nor to be had from the hub ({type(error).__name__}: {why}); "
                "give a local directory: model.path=/path/to/model"
            ) from error
        file = Path(cached)
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.path={path}: {file} is not JSON: {error}") from error
    return config.get("text_config", config)


def resolve_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={device}: this machine has no CUDA device; use model.device=cpu")
    if int(device.partition(":")[2] or 0) >= max(1, torch.cuda.device_count()):
        raise ValueError(
            f"model.device={device}: this machine has {torch.cuda.device_count()} CUDA device(s), from 0 on"
        )
    return device


def resolve_sync(sync: Sync, rollout: Rollout, device: str, ranks: int = 1) -> tuple[str, str]:
    import torch

    from grpo.sync import auto

    gpus = torch.cuda.device_count()
    if sync.backend == "auto":
        return auto(device=device, gpus=gpus, attached=bool(rollout.urls), ranks=ranks)
    if sync.backend in ("ipc", "nccl") and device == "cpu":
        raise ValueError(f"sync={sync.backend}: needs a CUDA device, model.device is cpu; use sync=disk")
    if sync.backend == "nccl" and not rollout.urls and gpus <= ranks:
        other = "ipc" if ranks == 1 else "disk"
        raise ValueError(f"sync=nccl: trainer and server need a GPU each, this machine has {gpus}; use sync={other}")
    return sync.backend, "as asked"


def check_server(rollout: Rollout) -> None:
    if rollout.urls:
        return
    if find_spec("vllm") is None:
        raise ValueError(
            "rollout: vLLM is not installed, so no server can be launched: pip install 'grpo[cpu]' or 'grpo[gpu]' "
            "(./dev sets up either), or attach to a server: rollout.urls=[http://host:port]"
        )
    if rollout.port is not None:
        for port in range(rollout.port, rollout.port + rollout.servers):
            if not kept.servers.holds(port):
                check_port(rollout.host, port)


def check_reachable(urls: list[str]) -> None:
    """Raises ValueError when nothing listens at one of `rollout.urls`. Not part of `check`: a plan needs no server."""
    for url in urls:
        parts = urlsplit(url)
        assert parts.hostname is not None, "rollout.urls are checked by the settings"
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT).close()
        except OSError as error:
            raise ValueError(
                f"rollout.urls: nothing answers at {url} ({error.strerror or error}); start the server first"
            ) from error


def check_folder(folder: str | None) -> None:
    if folder is None:
        return
    path = Path(folder)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"sync.dir={folder}: {existing} is no folder that can be written to")


def check_track(node: Any) -> None:
    if "wandb" in str(node.get("_target_", "")).lower() and find_spec("wandb") is None:
        raise ValueError("track=wandb: wandb is not installed: pip install 'grpo[wandb]'")
