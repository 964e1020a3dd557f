"""Every mistake that can be seen before a model is loaded, in one line each, within seconds.

`check` builds the settings (which check themselves), then looks at how they fit together and at what the machine has.
It touches no model: of a hub model it reads config.json.
"""

import json
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.settings import Model, Rollout, Sync, Train

HUB_TIMEOUT = 3  # seconds for a hub to answer


@dataclass(slots=True)
class Plan:
    """What will be run. `data` and `loss` are the built objects, `sync_backend` what `auto` has become."""

    train: Train
    model: Model
    rollout: Rollout
    sync: Sync
    data: Any
    loss: Any
    model_path: str
    model_config: dict[str, Any]
    device: str
    sync_backend: str
    sync_reason: str
    context: int
    groups_per_step: int

    def lines(self) -> list[str]:
        """The plan, for people."""
        train, rollout = self.train, self.rollout
        where = ", ".join(rollout.urls) if rollout.urls else f"{rollout.servers} launched on {rollout.host}"
        return [
            f"model     {self.model_path} ({self.model_config.get('model_type')}, {self.model.dtype}) on {self.device}",
            f"data      {type(self.data).__name__}: prompt <= {self.data.max_prompt_tokens} + completion <= "
            f"{self.data.max_tokens} tokens, context {self.context}",
            f"rollout   {where}; groups of {rollout.group_size}, max_staleness {rollout.max_staleness}, "
            f"<= {rollout.max_inflight} requests open",
            f"batch     {train.batch_size} completions = {self.groups_per_step} groups a step, "
            f"{train.minibatches} optimizer step(s) each; {train.steps} steps, lr {self.model.lr:g}",
            f"loss      {type(self.loss).__name__}: advantage {self.loss.advantage}, {self.loss.aggregation}",
            f"sync      {self.sync_backend} ({self.sync_reason}), pause {self.sync.pause}, "
            f"proven every {self.sync.verify_every} syncs",
        ]


def check(cfg: DictConfig, root: Path) -> Plan:
    """Raises ValueError with one line that names key, value and what would be right."""
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ValueError(f"the configuration does not resolve: {str(error).splitlines()[0]}") from error
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError(f"{missing[0]}: no value; give {missing[0]}=<value>")
    for key in ("seed",):
        if not isinstance(cfg[key], int):
            raise ValueError(f"{key}={cfg[key]!r}: expected a whole number")
    train: Train = build(cfg.train, "train")
    model: Model = build(cfg.model, "model")
    rollout: Rollout = build(cfg.rollout, "rollout")
    sync: Sync = build(cfg.sync, "sync")
    if train.batch_size % rollout.group_size:
        raise ValueError(
            f"train.batch_size={train.batch_size} is not a multiple of rollout.group_size={rollout.group_size}: "
            f"try {max(1, round(train.batch_size / rollout.group_size)) * rollout.group_size}"
        )
    if train.minibatches > train.batch_size:
        raise ValueError(f"train.minibatches={train.minibatches}: more than train.batch_size={train.batch_size}")
    data = build(cfg.data, "data")
    data.check()
    loss = build(cfg.loss, "loss")
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size={rollout.group_size}: loss.advantage={loss.advantage} compares the completions of a "
            "group; use 2 or more"
        )
    path = resolve_model(model.path, root)
    config = read_config(path)
    context = int(config.get("max_position_embeddings") or 0)
    needed = data.max_prompt_tokens + data.max_tokens
    if context and needed > context:
        raise ValueError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} + data.max_tokens={data.max_tokens} = {needed} is longer "
            f"than the model's context of {context} (max_position_embeddings of {path})"
        )
    device = resolve_device(model.device)
    backend, reason = resolve_sync(sync, rollout, device)
    check_server(rollout)
    check_track(cfg.track)
    return Plan(
        train=train,
        model=model,
        rollout=rollout,
        sync=sync,
        data=data,
        loss=loss,
        model_path=path,
        model_config=config,
        device=device,
        sync_backend=backend,
        sync_reason=reason,
        context=context,
        groups_per_step=train.batch_size // rollout.group_size,
    )


def build(node: Any, name: str) -> Any:
    """Instantiate one group; plain lists and dicts reach it. A ValueError keeps its one line."""
    from hydra.errors import InstantiationException

    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from error
        if isinstance(cause, TypeError):
            raise ValueError(f"{name}: {cause}") from error
        raise ValueError(f"{name}: {str(error).splitlines()[0]} ({cause})") from error


def resolve_model(path: str, root: Path) -> str:
    """A local directory (given from where the user stands, or from the repository), else a hub id."""
    for candidate in (Path(path).expanduser(), root / path):
        if candidate.is_dir():
            if not (candidate / "config.json").is_file():
                raise ValueError(f"model.path={path}: no config.json in {candidate}; it is no model directory")
            return str(candidate.resolve())
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ValueError(f"model.path={path}: no such directory, and no hub id (owner/name) either")
    return path


def read_config(path: str) -> dict[str, Any]:
    """The model's config.json; of a hub model from the cache or the hub, never its weights."""
    file = Path(path) / "config.json"
    if not file.is_file():
        from huggingface_hub import hf_hub_download

        os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_TIMEOUT))
        try:
            file = Path(hf_hub_download(path, "config.json", etag_timeout=HUB_TIMEOUT))
        except Exception as error:  # a dozen kinds: no network, no such model, gated, offline
            why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"model.path={path}: neither in the cache nor to be had from the hub ({type(error).__name__}: {why}); "
                "give a local directory: model.path=/path/to/model"
            ) from error
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
    return device


def resolve_sync(sync: Sync, rollout: Rollout, device: str) -> tuple[str, str]:
    import torch

    from grpo.sync import auto

    gpus = torch.cuda.device_count()
    if sync.backend == "auto":
        return auto(device=device, gpus=gpus, attached=bool(rollout.urls))
    if sync.backend in ("ipc", "nccl") and device == "cpu":
        raise ValueError(f"sync={sync.backend}: needs a CUDA device, model.device is cpu; use sync=disk")
    if sync.backend == "nccl" and not rollout.urls and gpus < 2:
        raise ValueError(f"sync=nccl: trainer and server need a GPU each, this machine has {gpus}; use sync=ipc")
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
            with socket.socket() as probe:
                try:
                    probe.bind((rollout.host, port))
                except OSError as error:
                    raise ValueError(
                        f"rollout.port={port}: cannot be used on {rollout.host} ({error.strerror})"
                    ) from error


def check_track(node: Any) -> None:
    if "wandb" in str(node.get("_target_", "")).lower() and find_spec("wandb") is None:
        raise ValueError("track=wandb: wandb is not installed: pip install 'grpo[wandb]'")


def claim(folder: Path, *, resuming: bool) -> None:
    """Make the run folder ours. Refuses a folder that holds a run, except to resume that run."""
    folder.mkdir(parents=True, exist_ok=True)
    if resuming:
        return
    try:
        (folder / "status.json").open("x").close()
    except FileExistsError:
        raise ValueError(
            f"{folder}: holds a run already; go on with it (resume={folder}), or choose another hydra.run.dir"
        ) from None
