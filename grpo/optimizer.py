"""AdamW with float32 state for a model that computes in any dtype, gradient clipping, and the learning rate's schedule.

A float32 model is stepped by torch's fused AdamW as it is. Parameters in bfloat16 get what a bfloat16 sum would lose: a
float32 master copy, float32 moments, and a float32 gradient that the micro-batches add up in (`parameter.main_grad`; a
hook moves each micro-batch's bfloat16 `.grad` there and frees it). After a step the masters are rounded into the model.

A step whose gradient norm is not finite changes nothing: the caller reads it off the norm and decides. A saved and
restored optimizer goes on bit for bit. `kind="adamw_bf16"` keeps the moments in bfloat16 (`grpo.adamw_bf16`): 14 bytes
for a bfloat16 parameter and its gradient, master and moments, where "adamw" takes 18. Left out: 8-bit moments,
parameter groups with their own learning rates.

How far a step has moved the parameters (`update_size`) is measured, not derived from the moments: each slice of them is
copied, stepped and compared. So it is exact for every kind, rounding included, and costs the memory of a slice.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from grpo.adamw_bf16 import BFloat16AdamW

# Elements stepped at once, and copied meanwhile: 256 MB in float32. A larger parameter is a slice of its own.
SLICE = 2**26

Kind = Literal["adamw", "adamw_bf16"]
Schedule = Literal["constant", "cosine"]


def learning_rate(step: int, *, lr: float, warmup_steps: int, schedule: Schedule, total_steps: int) -> float:
    """The rate of step `step` (from 0): linear from lr / warmup_steps to lr, then constant or half a cosine down to 0.

    The cosine reaches 0 at `total_steps`, one step after the last.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizer:
    """Steps `parameters` after the micro-batches' backward passes have added up their gradients.

    `weight_decay` applies to matrices and leaves norms and biases alone. `max_grad_norm=0` turns clipping off; the norm
    is measured all the same.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        kind: Kind = "adamw",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        total_steps: int = 0,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"model.lr={lr} must be 0 or greater")
        if kind not in ("adamw", "adamw_bf16"):
            raise ValueError(f"model.optimizer={kind!r} must be adamw or adamw_bf16")
        if schedule not in ("constant", "cosine"):
            raise ValueError(f"model.schedule={schedule!r} must be constant or cosine")
        if schedule == "cosine" and total_steps <= warmup_steps:
            raise ValueError(f"a cosine schedule needs total_steps={total_steps} > warmup_steps={warmup_steps}")
        self.lr, self.warmup_steps, self.schedule, self.total_steps = lr, warmup_steps, schedule, total_steps
        self.max_grad_norm = max_grad_norm
        self.steps = 0
        # Of the last step: ||new - old|| / ||old||, 2-norms over all parameters (the float32 masters of bfloat16 ones).
        self.update_size = 0.0
        self.parameters = [p for p in parameters if p.requires_grad]
        assert self.parameters, "nothing to train"
        # masters[i] is parameters[i] itself where that is wide enough
        self.masters = [_master(p) for p in self.parameters]
        groups = [
            {"params": [m for m in self.masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw: torch.optim.Optimizer
        if kind == "adamw":
            self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        else:
            assert all(m.dtype == torch.float32 for m in self.masters), "float64 parameters want float64 moments"
            self._adamw = BFloat16AdamW(groups, lr=lr, betas=betas, eps=eps)

    @property
    def next_lr(self) -> float:
        """The rate that the next step will use."""
        return learning_rate(
            self.steps, lr=self.lr, warmup_steps=self.warmup_steps, schedule=self.schedule, total_steps=self.total_steps
        )

    def step(self) -> float:
        """Clip, step, forget the gradients. Returns the gradient's 2-norm before clipping, and sets `update_size`.

        If the norm is not finite nothing is changed except that the gradients are forgotten.
        """
        grads = self.gradients()
        assert grads, "no backward pass since the last step"
        value = self._norm(grads)
        self.update_size = 0.0
        if math.isfinite(value):
            if self.max_grad_norm:
                clip_grads_with_norm_(self.masters, self.max_grad_norm, torch.tensor(value).to(grads[0]))
            for group in self._adamw.param_groups:
                group["lr"] = self.next_lr
            self.update_size = self._move()
            self._round_masters()
            self.steps += 1
        self.zero_grad()
        return value

    def gradients(self) -> list[Tensor]:
        """What the backward passes have added up since the last step, in the masters' order; not copies."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                master.grad = parameter.main_grad  # type: ignore[attr-defined]
        return [m.grad for m in self.masters if m.grad is not None]

    @torch.no_grad()
    def _move(self) -> float:
        """AdamW's step, a slice of the parameters at a time; returns `update_size`.

        The order is that of the parameter groups, so that the random numbers of "adamw_bf16" do not depend on slices.
        """
        order = [m for group in self._adamw.param_groups for m in group["params"]]
        held = [m.grad for m in order]
        for m in order:
            m.grad = None  # AdamW leaves a parameter without a gradient alone
        old = moved = 0.0  # squares
        for start, stop in _slices([m.numel() for m in order]):
            part = order[start:stop]
            before = [m.detach().clone() for m in part]
            for m, grad in zip(part, held[start:stop], strict=True):
                m.grad = grad
            self._adamw.step()
            for m in part:
                m.grad = None
            old += total_norm(before) ** 2
            torch._foreach_sub_(before, part)
            moved += total_norm(before) ** 2
        old, moved = self._whole(old, moved)
        return math.sqrt(moved / old) if old else math.inf if moved else 0.0

    def _norm(self, grads: list[Tensor]) -> float:
        """Of the whole gradient."""
        return total_norm(grads)

    def _whole(self, *squares: float) -> tuple[float, ...]:
        """Sums over these parameters -> over all of the model's; these are all."""
        return squares

    def zero_grad(self) -> None:
        """Forget the gradients of a batch that will not be stepped."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = None
            master.grad = None
            if parameter is not master:
                parameter.main_grad.zero_()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Everything a continuation needs besides the model's own weights. Tensors are not copied."""
        narrow = [m.detach() if p is not m else None for p, m in zip(self.parameters, self.masters, strict=True)]
        return {"steps": self.steps, "adamw": self._adamw.state_dict(), "masters": narrow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, for the same parameters in the same order, and the model with it."""
        masters = state["masters"]
        if len(masters) != len(self.masters):
            raise ValueError(f"the checkpoint holds {len(masters)} parameters, the model has {len(self.masters)}")
        for parameter, master, saved in zip(self.parameters, self.masters, masters, strict=True):
            if (saved is None) != (parameter is master):
                raise ValueError("the checkpoint was written with another model.dtype")
            if saved is not None:
                master.detach().copy_(saved)
        self._adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


def total_norm(tensors: list[Tensor]) -> float:
    """The 2-norm of all elements of all tensors. Waits for the device.

    On the CPU by rows of 1,024: torch's float32 norm there adds up one square after the other, and is 2 % short at 10^8
    elements.
    """
    norms = []
    for x in tensors:
        flat, whole = x.reshape(-1), x.numel() // 1024 * 1024
        pieces = (flat[:whole].view(-1, 1024), flat[whole:]) if x.device.type == "cpu" else (flat,)
        norms += [torch.linalg.vector_norm(piece, dim=-1).view(-1) for piece in pieces]
    return float(torch.cat(norms).double().norm())


def _slices(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Borders of runs of `sizes` that add up to at most SLICE (or are one)."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > SLICE:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)


def accumulate_in_float32(parameter: torch.nn.Parameter) -> None:
    """Add up a bfloat16 parameter's gradients in `parameter.main_grad`, float32; its `.grad` is freed as it arrives."""
    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(_to_main_grad)


def _master(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    accumulate_in_float32(parameter)
    return torch.nn.Parameter(parameter.detach().float())


def _to_main_grad(parameter: Tensor) -> None:
    if parameter.grad is not None:  # else a product has added it already (`grpo.linear`)
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
