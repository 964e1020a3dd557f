"""How the memory of a GPU that trainer and server share is going to be used, worked out before anything is loaded.

Bytes a parameter: the compute dtype's 2 (bfloat16) or 4 (float32), 4 for the gradient's float32 sums, and for AdamW
12 (masters and moments in float32; 8 with bfloat16 moments; 8 where the parameters are the float32 masters). They are
exact on one GPU. Over several each has its share of them, the compute dtype's only in what FSDP2 gathers at a time:
embedding and head from the forward to the backward pass, and two layers, with their gradients. With LoRA gradients and
optimizer are those of the adapters alone, and the reference is the base, which is there. Activations are an
estimate for decoder layers with gated MLPs (Llama, Qwen), per token and layer, in elements of 2 bytes, with hidden size
D, MLP size I, query, key and value widths q, k, v:

| checkpointing | kept of each layer |
| --- | --- |
| none | 3 I + 2 (q + k + v) + q + 4 D |
| selective | (q + k + v) + q + 3 D |
| full | q + D, and one layer's worth of "none" while it is computed again |

On an H200 at Qwen3-4B's shape this gave, against what was measured (GB, activations and 1 GB for the head): none at 8k
tokens 33.9 (33.7), selective at 4k 6.3 (5.5), full at 16k 10.7 (11.4). See benchmarks/NOTES.md.
"""

import os
from dataclasses import dataclass
from typing import Any

from grpo.rollout.flags import gpus_of_servers
from grpo.settings import Model, Rollout

HEAD_GB = 1.0  # what the chunked head takes at most (grpo.logprobs)
CUDA_GB = 1.5  # the contexts of two processes


@dataclass(slots=True, frozen=True)
class Shape:
    """Of a dense decoder. width: of queries, keys and values together; queries: of the queries alone."""

    layers: int
    hidden: int
    mlp: int
    queries: int
    width: int
    vocabulary: int
    tied: bool

    @property
    def layer(self) -> int:
        """Parameters of one. Matrices only; norms and biases are less than a thousandth."""
        return self.hidden * (self.width + self.queries + 3 * self.mlp)

    def adapters(self, rank: int, targets: str | list[str]) -> int:
        """Parameters of LoRA: rank * (in + out) of each linear layer that gets one, by the names of Llama and Qwen."""
        keys = (self.width - self.queries) // 2
        widths = {
            "q_proj": self.hidden + self.queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": self.queries + self.hidden,
            "gate_proj": self.hidden + self.mlp,
            "up_proj": self.hidden + self.mlp,
            "down_proj": self.mlp + self.hidden,
        }
        chosen = widths if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
        return self.layers * rank * sum(widths.get(name, 0) for name in chosen)

    @property
    def outside(self) -> int:
        """Embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside


def shape_of(config: dict[str, Any]) -> Shape | None:
    """From a config.json; None for what is no dense decoder with a gated MLP, or is not known yet (a hub model)."""
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head = int(config.get("head_dim") or hidden // heads)
        groups = int(config.get("num_key_value_heads") or heads)
        shape = Shape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            mlp=int(config["intermediate_size"]),
            queries=heads * head,
            width=(heads + 2 * groups) * head,
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    sizes = (shape.layers, shape.hidden, shape.mlp, shape.queries, shape.vocabulary)
    return None if min(sizes) < 1 or any("expert" in key for key in config) else shape


@dataclass(slots=True, frozen=True)
class Budget:
    """GB (1e9 bytes) on the trainer's GPU. server: its share, 0 where it has a GPU of its own."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    server: float
    card: float

    @property
    def fixed(self) -> float:
        """What is known exactly."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.server

    @property
    def total(self) -> float:
        return self.fixed + self.activations + CUDA_GB

    def line(self) -> str:
        """For the plan."""
        reference = f", reference {self.reference:.1f}" if self.reference else ""
        server = f" + server {self.server:.1f}" if self.server else ""
        tight = "" if self.total <= self.card else ": TIGHT, activations may not fit"
        return (
            f"memory    weights {self.weights:.1f}, gradients {self.gradients:.1f}, optimizer {self.optimizer:.1f}"
            f"{reference}, activations about {self.activations:.1f}{server} = about {self.total:.0f} of "
            f"{self.card:.0f} GB{tight}"
        )

    def check(self, model: Model) -> None:
        """Raises ValueError when not even the exact parts fit."""
        if self.fixed > self.card:
            server = f" and model.server_memory={model.server_memory:g} gives the server {self.server:.0f} GB"
            raise ValueError(
                f"model.optimizer={model.optimizer}: weights, gradients and optimizer of this model take "
                f"{self.fixed - self.server:.0f} GB{server if self.server else ''}, the GPU has {self.card:.0f} GB; "
                "use model.optimizer=adamw_bf16, model.lora_rank, a smaller model.server_memory, or more GPUs"
            )


def budget(
    shape: Shape, model: Model, *, microbatch: int, reference: bool, server_share: float, card: float, ranks: int = 1
) -> Budget:
    """microbatch: tokens of one forward pass. server_share: of the card's memory, 0 if it is elsewhere. card: GB.
    ranks: GPUs that share parameters, gradients and optimizer among them (`grpo.sharded`)."""
    size = 4 if model.dtype == "float32" else 2
    state = 8 if model.dtype == "float32" or model.optimizer == "adamw_bf16" else 12
    parameters = shape.parameters / 1e9 / ranks
    adapters = shape.adapters(model.lora_rank, model.lora_targets) / 1e9
    trained = adapters if model.lora_rank else parameters
    gathered = (shape.outside + 2 * shape.layer) / 1e9 if ranks > 1 else 0.0
    kept_too = ranks == 1 or model.dtype == "float32"  # a bfloat16 model's shards are the optimizer's masters
    kept = {
        "none": 3 * shape.mlp + 2 * shape.width + shape.queries + 4 * shape.hidden,
        "selective": shape.width + shape.queries + 3 * shape.hidden,
        "full": shape.queries + shape.hidden,
    }
    elements = shape.layers * kept[model.checkpointing] + (kept["none"] if model.checkpointing == "full" else 0)
    return Budget(
        weights=((parameters + adapters) * size if kept_too else 0.0) + gathered * size,
        gradients=trained * 4 + gathered * size,
        optimizer=trained * state,
        reference=parameters * size if reference and not model.lora_rank else 0.0,
        activations=microbatch * elements * size / 1e9 + HEAD_GB,
        server=server_share * card,
        card=card,
    )


def plan_memory(
    config: dict[str, Any],
    model: Model,
    rollout: Rollout,
    *,
    microbatch: int,
    reference: bool,
    device: str,
    backend: str,
) -> Budget | None:
    """The budget of this machine's GPU; None on a CPU and for a shape that is not known.

    Raises ValueError when there are too few GPUs for the servers.
    """
    shape = shape_of(config)
    if shape is None or not device.startswith("cuda"):
        return None
    import torch

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shared = False
    if not rollout.urls:
        shared = gpus_of_servers(
            device=device,
            available=torch.cuda.device_count(),
            backend=backend,
            servers=rollout.servers,
            tensor_parallel=rollout.tensor_parallel,
            trainers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )[1]
    return budget(
        shape,
        model,
        microbatch=microbatch,
        reference=reference,
        server_share=(rollout.gpu_memory or model.server_memory) if shared else 0.0,
        card=torch.cuda.get_device_properties(device).total_memory / 1e9,
        ranks=ranks,
    )
