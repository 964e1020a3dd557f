"""The policy and its optimizer over several ranks: FSDP2, seen from rank 0 as one policy and one optimizer.

A micro-batch of a sharded policy is what all ranks compute at once: `pack` balances the tokens over them and joins the
parts. `logprobs` sends each rank its part, and gives the values of all, differentiable: when rank 0 calls `backward` on
its loss, each rank gets the gradient of its own tokens' logprobs and goes on from there. So loss, weights (law 5:
one denominator), metrics and refusals are computed in one place, as with one process, and no rank needs to know them.
The gradient of a sum is the sum over ranks, never a mean. Every rank runs as many passes as the others.

Each rank holds a shard of every parameter, of its gradient and of its moments, in float32 (float64 for a model in
float64), and gathers one layer at a time in the model's dtype. Gradients are reduced over ranks in float32, and
micro-batches add up in float32 shards; within a micro-batch the gradient of a bfloat16 weight is rounded once to
bfloat16 (one process adds products up unrounded: `grpo.linear`). Checkpoints are those of one process, for any number
of ranks.

Zhao et al., PyTorch FSDP, 2023 (arXiv:2304.11277). Left out: `Policy.backward`, several replicas of a sharded model,
a fixed assignment of stochastic rounding to parameters ("adamw_bf16" draws other noise on another number of ranks).

Shapes: as in `grpo.batch`; the ranks' N tokens are end to end, in the order of ranks.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo.adamw_bf16 import BFloat16AdamW
from grpo.batch import MicroBatch, Sequence, join, pack
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.team import Team


class ShardedPolicy(Policy):
    """Every rank has one; the public methods are rank 0's. Settings are those of `Policy`, but the device."""

    def __init__(self, path: str | Path, *, team: Team, name: str, **settings: Any) -> None:
        self.team, self.name = team, name
        self._outputs: tuple[Tensor, Tensor] | None = None  # of the forward pass that waits for its backward pass
        super().__init__(path, device=team.device, **settings)
        self._anchor = torch.zeros((), requires_grad=self.trainable)  # what makes `logprobs` differentiable

    # ---- rank 0 ----

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to train, each once: DTensors of the whole shape, of which this rank holds a part."""
        return [p for p in self._weights.values() if p.requires_grad]

    def pack(
        self,
        sequences: Seq[Sequence],
        *,
        tokens_per_microbatch: int,
        pad_to: int | None = None,
        share_prompts: bool = False,
    ) -> list[MicroBatch]:
        """`tokens_per_microbatch` is each rank's."""
        by_rank = [
            pack(
                sequences,
                tokens_per_microbatch=tokens_per_microbatch,
                context=self.context,
                pad_to=pad_to,
                share_prompts=share_prompts,
                rank=rank,
                ranks=self.team.ranks,
            )
            for rank in range(self.team.ranks)
        ]
        return [join(shards) for shards in zip(*by_rank, strict=True)]

    def logprobs(self, mb: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """As `Policy.logprobs`, of a micro-batch from `pack`. One backward pass is due before the next one begins."""
        trained = torch.is_grad_enabled() and self.trainable
        return _Together.apply(self._anchor, self, mb, temperature, entropy_grad, trained)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Gathered one by one; without `dtype` nothing is, and the tensors have a shape and a device but no memory."""
        for name, weight in self._weights.items():
            if dtype is None:
                yield name, torch.zeros((), dtype=self.dtype, device=self.device).expand(weight.shape)
            else:
                yield name, self.team.everywhere(self.name, "_gather", name, dtype)[0]

    def save(self, path: str | Path) -> None:
        self.save_by_tensor(path)

    # ---- every rank ----

    def _compute(self, mb: MicroBatch, temperature: float, entropy_grad: bool, trained: bool) -> tuple[Tensor, Tensor]:
        """This rank's part, forward; for the others the values, on the CPU."""
        mb = mb.to(self.device)
        with torch.set_grad_enabled(trained):
            # Copies: FSDP hooks into the outputs, and warns of views.
            outputs = self._root(lambda: tuple(x.clone() for x in Policy.logprobs(self, mb, temperature, entropy_grad)))
        if trained:
            self._outputs = outputs
        else:
            self._reshard()
        return tuple(x.detach().cpu() for x in outputs)

    def _backpropagate(self, grads: tuple[Tensor | None, Tensor | None]) -> None:
        """This rank's part, backward, from the gradients of logprobs and entropy."""
        assert self._outputs is not None, "no forward pass waits for this"
        outputs, self._outputs = self._outputs, None
        pairs = [(x, g.to(self.device)) for x, g in zip(outputs, grads, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])

    def _gather(self, name: str, dtype: torch.dtype) -> Tensor | None:
        whole = self._weights[name].detach().to(dtype).full_tensor()
        return whole if self.team.rank == 0 else None

    def _place(self) -> None:
        layers = getattr(self.body, "layers", None)
        if layers is None:
            raise ValueError(
                f"model type {self.config.model_type!r} has no list of layers to shard: run it without torchrun"
            )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        settings: dict[str, Any] = {
            "mesh": self.team.mesh,
            "mp_policy": MixedPrecisionPolicy(self.dtype, wide, cast_forward_inputs=False),
        }
        self._root = _Root(self.model)
        for module in (*layers, self._root):
            for parameter in module.parameters():
                if self.trainable and not isinstance(parameter, DTensor):  # one layer at a time
                    parameter.data = parameter.data.to(wide)
            fully_shard(module, **settings)
            # A sum over ranks: FSDP's own way is a mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product with a factor
        self._weights: dict[str, Any] = dict(self.model.named_parameters())

    @torch.no_grad()
    def _check_forward(self) -> None:
        self._root(super()._check_forward)
        self._reshard()

    def _compile(self, layer: nn.Module) -> None:
        # The layer's own code alone: gathering and freeing its weights, FSDP's hooks, stay as they are.
        layer.forward = torch.compile(layer.forward, dynamic=True)

    def _reshard(self) -> None:
        """After a pass without a backward pass: the root (embedding, head) would stay whole, and become stale."""
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()


class _Root(nn.Module):
    """Runs any work with the weights outside of the layers gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class _Together(torch.autograd.Function):
    """All ranks' forward passes as one operation, whose backward pass is all ranks' backward passes."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        policy: ShardedPolicy,
        mb: MicroBatch,
        temperature: float,
        entropy_grad: bool,
        trained: bool,
    ) -> tuple[Tensor, Tensor]:
        settings = (temperature, entropy_grad, trained)
        results = policy.team.each(policy.name, "_compute", [(shard, *settings) for shard in mb.shards])
        logprobs_N, entropy_N = (torch.cat(values).to(policy.device) for values in zip(*results, strict=True))
        ctx.policy, ctx.lengths = policy, [len(shard.targets_N) for shard in mb.shards]
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor | None) -> tuple[None, ...]:
        parts = [[None] * len(ctx.lengths) if g is None else g.cpu().split(ctx.lengths) for g in grads_N]
        ctx.policy.team.each(ctx.policy.name, "_backpropagate", [(pair,) for pair in zip(*parts, strict=True)])
        return (None,) * 6


class ShardedOptimizer(Optimizer):
    """Every rank steps its shards of the team's "policy". Settings are those of `Optimizer`."""

    def __init__(self, *, team: Team, name: str, **settings: Any) -> None:
        self.team, self.name = team, name
        policy: ShardedPolicy = team.objects["policy"]
        self._shards: list[Any] = list(policy.parameters())
        self._rounded = policy.dtype != self._shards[0].dtype  # the model's files do not hold the masters
        # The same memory as ordinary tensors; `Policy` has run a forward pass, after which FSDP moves them no more.
        super().__init__([nn.Parameter(shard.detach().to_local()) for shard in self._shards], **settings)

    def step(self) -> float:
        norm: float = self.team.everywhere(self.name, "_step")[0]
        return norm

    def zero_grad(self) -> None:
        self.team.everywhere(self.name, "_zero_grad")

    def state_dict(self) -> dict[str, Any]:
        """That of one process: whole tensors, on the CPU, gathered one by one."""
        state: dict[str, Any] = self.team.everywhere(self.name, "_state")[0]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        masters = state["masters"]
        if len(masters) != len(self.masters):
            raise ValueError(f"the checkpoint holds {len(masters)} parameters, the model has {len(self.masters)}")
        if any((saved is None) == self._rounded for saved in masters):
            raise ValueError("the checkpoint was written with another model.dtype")
        plain = {
            "steps": state["steps"],
            "adamw": _with_moments(state["adamw"], self._shards, lambda moment, _: moment.dtype),
            "masters": [None if saved is None else saved.dtype for saved in masters],
        }
        self.team.each(self.name, "_load", [(state,)] + [(plain,)] * (self.team.ranks - 1))

    # ---- every rank ----

    def gradients(self) -> list[Tensor]:
        for local, shard in zip(self.parameters, self._shards, strict=True):
            local.grad = None if shard.grad is None else shard.grad.to_local()
        return super().gradients()

    def _step(self) -> float:
        return super().step()

    def _zero_grad(self) -> None:
        for shard in self._shards:
            shard.grad = None
        super().zero_grad()

    def _norm(self, grads: list[Tensor]) -> float:
        return math.sqrt(self._whole(super()._norm(grads) ** 2)[0])

    def _whole(self, *squares: float) -> tuple[float, ...]:
        total = torch.tensor(squares, dtype=torch.float64, device=self.team.device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def _state(self) -> dict[str, Any] | None:
        adamw = _with_moments(self._adamw.state_dict(), self._in_adamws_order(), self._gather)
        masters = [
            self._gather(m.detach(), shard) if self._rounded else None
            for m, shard in zip(self.masters, self._shards, strict=True)
        ]
        return {"steps": self.steps, "adamw": adamw, "masters": masters} if self.team.rank == 0 else None

    def _load(self, state: dict[str, Any]) -> None:
        """Rank 0 has the tensors, the others have their dtypes."""
        for master, shard, saved in zip(self.masters, self._shards, state["masters"], strict=True):
            if saved is not None:
                master.detach().copy_(self._spread(saved, shard))
        self._adamw.load_state_dict(_with_moments(state["adamw"], self._in_adamws_order(), self._spread))
        if self.team.rank and isinstance(self._adamw, BFloat16AdamW):
            self._adamw.noise.manual_seed(state["steps"] * self.team.ranks + self.team.rank)  # not rank 0's once more
        self.steps = state["steps"]

    def _in_adamws_order(self) -> list[Any]:
        """The shards as the optimizer counts them: by its groups."""
        shard_of = {id(m): shard for m, shard in zip(self.masters, self._shards, strict=True)}
        return [shard_of[id(m)] for group in self._adamw.param_groups for m in group["params"]]

    def _gather(self, local: Tensor, shard: Any) -> Tensor | None:
        """The whole of what `local` is this rank's shard of, on rank 0."""
        part = DTensor.from_local(
            local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        whole = part.full_tensor()
        return whole.cpu() if self.team.rank == 0 else None

    def _spread(self, whole: Tensor | torch.dtype, shard: Any) -> Tensor:
        """This rank's shard of a tensor that rank 0 has; the others know its dtype."""
        if isinstance(whole, torch.dtype):
            whole = torch.empty(shard.shape, dtype=whole, device=self.team.device)
        return distribute_tensor(whole.to(self.team.device), shard.device_mesh, shard.placements).to_local()


def _with_moments(adamw: dict[str, Any], shards: Seq[Any], change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """AdamW's `state_dict` with `change(moment, shard)` in place of each moment."""
    state = {
        i: {key: change(value, shards[i]) if key.startswith("exp_avg") else value for key, value in one.items()}
        for i, one in sorted(adamw["state"].items())
    }
    return {**adamw, "state": state}
