"""Law 5, one denominator: what each token's loss is multiplied by, decided before the first micro-batch.

The loss of an optimizer batch is sum_n weight_n * token_loss_n. The weights come from the lengths of the whole batch,
so splitting it into micro-batches (or over ranks) changes nothing. Rejecting or clipping a token does not change them
either: a loss that drops tokens while it runs keeps their place in the denominator (as TRL, AReaL, SkyRL).

Left out: the mean of micro-batch means (TRL `bnpo`; 1.25 where the token mean is 0.65), padded widths (ROLL, verl's
`-norm`), and the 1e-8 that some peers add to a denominator.
"""

AGGREGATIONS = ("token_mean", "sequence_mean", "fixed")


def sequence_weights(
    aggregation: str, lengths: list[int], total_sequences: int, max_tokens: int | None = None
) -> list[float]:
    """The weight of every trained token of each sequence of an optimizer batch.

    `lengths` are trained tokens per sequence; 0 is a sequence that is masked entirely and gets weight 0.

    - token_mean: 1 / sum of lengths (DAPO, arXiv:2503.14476, eq. 8): every token counts the same.
    - sequence_mean: 1 / (sequences with a trained token * length) (GRPO, arXiv:2402.03300, eq. 3): every sequence
      counts the same. A sequence that is masked entirely is out of the denominator (verl, OpenRLHF), so masking it is
      the same as never having sampled it; SkyRL and TRL count it.
    - fixed: 1 / (total_sequences * max_tokens) (Dr. GRPO, arXiv:2503.20783): a constant, so sequences that are masked
      entirely stay counted, as in TRL and SkyRL.

    A batch without a trained token gives zeros, so that its loss is 0 and not NaN.
    """
    assert len(lengths) <= total_sequences, f"{len(lengths)} sequences of {total_sequences}"
    trained_tokens = sum(lengths)
    trained_sequences = sum(length > 0 for length in lengths)
    if aggregation == "token_mean":
        return [1 / trained_tokens if length else 0.0 for length in lengths]
    if aggregation == "sequence_mean":
        return [1 / (trained_sequences * length) if length else 0.0 for length in lengths]
    if aggregation == "fixed":
        assert max_tokens is not None
        return [1 / (total_sequences * max_tokens) if length else 0.0 for length in lengths]
    raise ValueError(f"loss.aggregation={aggregation!r}: choose one of {', '.join(AGGREGATIONS)}")
