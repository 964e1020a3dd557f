"""The engine inside vLLM that takes weights from a safetensors file: for the CPU, where vLLM has none, and for any
server that sees the trainer's file system.

An update is whole or refused: names and shapes are compared with those of the model before a tensor is touched, so a
file that lacks a layer cannot half-update (vLLM would fill up with whatever the memory held). A refused file changes
nothing, and the next update starts afresh.

It also mends a fault of vLLM 0.32 on the CPU: with tied embeddings the reload leaves the head's pre-packed product at
the old weights. Every call answers 200, and logprobs are off by more than a nat.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo.sync.compare import compare_weights

Shapes = dict[str, list[int]]
SHOWN = 5  # names in an error


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """What the trainer will send: every tensor's name and shape."""

    shapes: Shapes


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """One file with every tensor, names as transformers' state_dict has them, a tied head left out.

    compare: load nothing; say which of the tensors the model has not, as an error: an update has no other answer.
    """

    path: str
    compare: bool = False


class DiskWeightTransferEngine(WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):
    """vLLM calls init, then for each update start, update, finish. Raises ValueError for what it refuses."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shapes: Shapes | None = None  # of the model, known from the handshake on
        self.received = False  # in the open update

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        shapes = self._model_shapes()
        compare(init_info.shapes, shapes, what="the trainer's model")
        self.shapes = shapes

    def start_weight_update(self) -> None:
        """Nothing yet: the layers are opened only for a file that has been looked at."""
        self.received = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        path = update_info.path
        if self.shapes is None:
            raise ValueError("update_weights came before init_weight_transfer_engine, which says what to expect")
        if self.received:
            raise ValueError(f"{path}: this update has had its file; one file holds all tensors")
        try:
            file = safe_open(path, framework="pt", device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors: {error}") from error
        with file as tensors:
            sent = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            compare(sent, self.shapes, what=path)
            if update_info.compare:
                dtype = self.model_config.dtype
                weights = {name: tensors.get_tensor(name).to(dtype) for name in sent}
                with torch.no_grad():
                    raise ValueError(str(compare_weights(self.model, weights)))
            initialize_layerwise_reload(self.model)
            try:
                with disable_mtp_completeness_check():
                    self.model.load_weights((name, tensors.get_tensor(name)) for name in sent)
            except Exception as error:
                raise RuntimeError(
                    f"{path}: loading broke off ({error}); this server's weights are a mixture until a whole update"
                ) from error
            finally:  # what did not arrive is put back, so that the model can compute
                finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_heads()
        self.received = True

    def finish_weight_update(self) -> None:
        """Raises RuntimeError when no file came: the version that follows would be that of the old weights."""
        if not self.received:
            raise RuntimeError("finish_weight_update without an update_weights")

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _model_shapes(self) -> Shapes:
        """Of every weight of the served model, as transformers has them; built without memory or files of weights."""
        config = AutoConfig.from_pretrained(
            self.model_config.hf_config_path or self.model_config.model,
            revision=self.model_config.revision,
            trust_remote_code=self.model_config.trust_remote_code,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=self.model_config.trust_remote_code)
        return {name: list(parameter.shape) for name, parameter in model.named_parameters()}

    def _refresh_tied_heads(self) -> None:
        """Pack the head's product again. Elsewhere than on a CPU nothing is packed, and this does nothing."""
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        for head in self.model.modules():
            if isinstance(head, ParallelLMHead):
                head.quant_method.process_weights_after_loading(head)


def compare(sent: Shapes, model: Shapes, *, what: str) -> None:
    """Raises ValueError that names the first differences of what is sent to what the model has."""
    missing = sorted(model.keys() - sent.keys())
    unknown = sorted(sent.keys() - model.keys())
    other = [f"{n} {sent[n]} not {model[n]}" for n in sorted(sent.keys() & model.keys()) if sent[n] != model[n]]
    problems = (("missing", missing), ("unknown", unknown), ("of another shape", other))
    found = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for kind, names in problems
        if names
    ]
    if found:
        raise ValueError(f"{what} does not fit the served model; tensors {'; '.join(found)}")
