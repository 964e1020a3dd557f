"""Linear layers that add their weight gradients up themselves, against plain layers with and without compilation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo.linear import AccumulatingLinear, accumulate_in_products
from grpo.optimizer import accumulate_in_float32


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=bias), nn.Linear(24, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def train(blocks: Any, dtype: torch.dtype) -> list[Tensor]:
    """Three micro-batches of different lengths; gradients of all parameters and of the last input."""
    draw = torch.Generator().manual_seed(1)
    for p in blocks.parameters():
        accumulate_in_float32(p)
    for length in (8, 5, 12):
        x = x_in = torch.randn(1, length, 16, generator=draw).to(dtype).requires_grad_()
        for block in blocks:
            x = block(x)
        x.float().square().mean().backward()
    assert x_in.grad is not None
    assert all(p.grad is None for p in blocks.parameters())
    return [p.main_grad for p in blocks.parameters()] + [x_in.grad.float()]


# both are torch.compile's own doing
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_plain_layers(bias: bool, backend: str | None, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(bias), Block(bias)]).to(dtype)
    ours = copy.deepcopy(plain)
    accumulate_in_products(ours)
    assert all(type(m) is AccumulatingLinear for m in ours.modules() if isinstance(m, nn.Linear))
    if backend:
        for block in ours:
            block.compile(backend=backend, dynamic=True)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for mine, theirs in zip(train(ours, dtype), train(plain, dtype), strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()
        assert theirs.norm() > 0


def test_without_a_sum_it_is_a_plain_layer() -> None:
    layer = nn.Linear(4, 3)
    accumulate_in_products(layer)  # a module counts among its own modules
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(3, 4))
    accumulate_in_float32(layer.weight)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_two_forwards_before_a_backward() -> None:
    layer = nn.Linear(4, 3, bias=False)
    accumulate_in_products(layer)
    accumulate_in_float32(layer.weight)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    first, second = layer(x), layer(2 * x)
    first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 3 * x.detach().sum(0).expand(3, 4))
