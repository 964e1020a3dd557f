"""The few tensor operations that the parts of a loss share. None takes a mean over a batch (law 5).

Left out: padding and masks. A token that is not trained is not in these tensors (`grpo.batch`), so no operation has to
remember to leave it out.

Shapes: N trained tokens of a micro-batch, B sequences. Logarithms are natural.
"""

import torch
from torch import Tensor

# exp(20) = 4.9e8: far outside every clip range, and finite with a finite gradient in float32. The bound of verl, SkyRL
# and OpenRLHF.
MAX_LOG_RATIO = 20.0


def clamp_log_ratio(log_ratio_N: Tensor) -> Tensor:
    """Bound a log-ratio to +-20 before it is exponentiated; a clamped entry has gradient zero.

    An infinity comes out as 20, an unlikely token: `Loss` makes the loss NaN for it.
    """
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Each token's value replaced by the sum over its sequence. Shape [N]."""
    sums_B = values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)
    return sums_B[sequence_N]


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Each token's value replaced by the mean over its sequence. Shape [N]."""
    lengths_N = sequence_sum(torch.ones_like(values_N), sequence_N, num_sequences)
    return sequence_sum(values_N, sequence_N, num_sequences) / lengths_N
