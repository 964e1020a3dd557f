"""The engine inside vLLM that takes weights from a safetensors file: for the CPU, where vLLM has none, and for any
server that sees the trainer's file system.

An update is whole or refused: names and shapes are compared with the first file that this server was given (the
trainer's own, whole by construction) before a tensor is touched, so a file that lacks a layer cannot half-update.

It also mends a fault of vLLM 0.32 on the CPU: with tied embeddings the reload leaves the head's pre-packed product at
the old weights. Every call answers 200, and logprobs are off by more than a nat.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """What the trainer will send: every tensor's name and shape."""

    shapes: dict[str, list[int]]


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """One file with every tensor, names as transformers' state_dict has them."""

    path: str


class DiskWeightTransferEngine(WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):
    """vLLM calls init, then for each update start, update, finish."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    shapes: dict[str, list[int]] | None = None

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        self.shapes = init_info.shapes

    def start_weight_update(self) -> None:
        """Nothing yet: the layers are opened only for a file that has been looked at."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        path = Path(update_info.path)
        try:
            file = safe_open(path, framework="pt", device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"update_info.path={path}: cannot be read as safetensors: {error}") from error
        with file as tensors:
            shapes = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            self._compare(path, shapes)
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights((name, tensors.get_tensor(name)) for name in shapes)
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()

    def finish_weight_update(self) -> None:
        """Nothing left: the update was whole."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _compare(self, path: Path, shapes: dict[str, list[int]]) -> None:
        if self.shapes is None:
            raise ValueError("no init_weight_transfer_engine call has said which tensors to expect")
        missing = sorted(self.shapes.keys() - shapes.keys())
        unknown = sorted(shapes.keys() - self.shapes.keys())
        other = sorted(n for n in shapes.keys() & self.shapes.keys() if shapes[n] != self.shapes[n])
        if missing or unknown or other:
            raise ValueError(f"{path}: missing tensors {missing}, unknown {unknown}, of another shape {other}")

    def _refresh_tied_head(self) -> None:
        if self.device.type != "cpu" or not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(head)
