"""AdamW with its two moments in bfloat16: 4 bytes less per parameter than in float32, for some noise.

The second moment changes by a thousandth a step (beta2 = 0.999), less than bfloat16 resolves (a 256th): rounded to the
nearest it would never move again. Both moments are therefore rounded stochastically, up or down with the probability
that keeps the mean (Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192). All arithmetic is in float32, a
slice of each parameter at a time. The parameters given here are the float32 masters of `grpo.optimizer`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Elements handled at once: 256 MB for each of the few float32 temporaries.
_SLICE = 2**26


class BFloat16AdamW(torch.optim.Optimizer):
    """Steps float32 parameters; `seed` decides the rounding, whose random state is part of the optimizer's state."""

    def __init__(
        self, params: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, seed: int = 0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.noise = torch.Generator(self.param_groups[0]["params"][0].device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step from each parameter's `.grad`."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        unbias1, unbias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        whole = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        for p, g, m, v in zip(*(x.view(-1).split(_SLICE) for x in whole), strict=True):
            first = m.float().lerp_(g, 1 - beta1)
            second = v.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
            m.copy_(stochastic_round(first, self.noise))
            v.copy_(stochastic_round(second, self.noise))
            p.mul_(1 - lr * group["weight_decay"])
            p.addcdiv_(first, second.div_(unbias2).sqrt_().add_(group["eps"]), value=-lr / unbias1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "noise": self.noise.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "noise"})
        for state in self.state.values():  # torch casts them to the parameters' dtype; the way back is exact
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()
        self.noise.set_state(state_dict["noise"].cpu())


def stochastic_round(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16: one of the two neighbours, so that the expectation is x. x is finite."""
    bits = x.view(torch.int32)
    # bfloat16 is the upper half of float32's bits: a uniform number below carries with the right probability, in
    # both signs, because floats are sign and magnitude.
    noise = torch.empty_like(bits).random_(0, 2**16, generator=generator)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()
