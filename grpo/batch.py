"""From sampled sequences to the trainer's tensors: micro-batches of whole sequences, packed end to end without padding.

A `Sequence` is one prompt with one sampled completion. `plan` decides which sequences share a micro-batch (a pure
function of the lengths, so every rank computes the same plan), `pack` makes the tensors. Nothing here knows a
loss or a model; the weight of each token is decided before (law 5: one denominator) and only carried.

What is not trained is not there: a masked sequence is left out by the caller, so nothing of it can leak into a loss
or a gradient. Left out: cutting a sequence in two (a sequence longer than the budget has a micro-batch to itself).

The same holds for tokens of a trained sequence that nobody sampled (observations between turns): the model reads them,
and none of the N arrays has a place for them.

A group's sequences begin with the same prompt. With `share_prompts` a micro-batch holds it once: its hidden states are
the same in each of them, and all but attention works on single tokens. Attention sees the sequences in full
(`unfold_F`), so each token still sees its own prompt and its own completion, and nothing else.

Shapes: T tokens of a micro-batch, F of its sequences in full (F = T where no prompt is shared), B sequences, N trained
tokens (the completions' sampled tokens).
"""

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Sequence:
    """A prompt and its completion as the server sampled it; logprobs and lags have one entry per sampled token.

    `mask[i]` says whether completion token i was sampled; None is all of them. `lags[n]` is the trainer's version minus
    the version that sampled sampled token n. `weight` is what every token's loss is multiplied by
    (`Loss.sequence_weights`).
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    lags: list[int]
    advantage: float
    weight: float
    mask: list[bool] | None = None

    def trained(self) -> list[int]:
        """Places in `completion_ids` of the sampled tokens."""
        places = range(len(self.completion_ids))
        return [*places] if self.mask is None else [i for i, sampled in zip(places, self.mask, strict=True) if sampled]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class MicroBatch:
    """Whole sequences packed end to end. The model sees [1, T]; the loss sees the N arrays, in the same order.

    `cu_seqlens` are the sequences' borders in F (one more entry where the tail is padding, which forms a sequence of
    its own that predicts nothing). `predict_N[n]` is the position whose next-token distribution gives token n, the
    token itself being `targets_N[n]`.
    """

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence
    cu_seqlens: Tensor  # int32 [B + 1], or [B + 2] with padding
    max_seqlen: int
    predict_N: Tensor  # int64, into T
    targets_N: Tensor  # int64
    sequence_N: Tensor  # int64, 0..B-1, non-decreasing
    sampler_logprobs_N: Tensor  # float32, of the distribution that was sampled
    advantages_N: Tensor  # float32
    weights_N: Tensor  # float32: the loss is sum_n weights_N * token_loss_N
    lag_N: Tensor  # int64
    rows: list[int]  # which sequences of the optimizer batch these are
    num_sequences: int  # B
    lengths: list[int]  # trained tokens of each sequence, which add up to N
    # Where prompts are shared: the place in T of each token of F, and a place in F of each token of T. int64.
    unfold_F: Tensor | None = None
    fold_T: Tensor | None = None
    # Where several ranks compute it at once (`join`): the part of each, on the CPU.
    shards: list["MicroBatch"] = field(default_factory=list)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device` (copied without waiting, from pinned memory to CUDA)."""
        if torch.device(device) == self.ids_T.device:
            return self
        pin = torch.device(device).type == "cuda"
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = (value.pin_memory() if pin else value).to(device, non_blocking=True)
            moved[f.name] = value
        return MicroBatch(**moved)


def plan(lengths: Seq[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Which rows each rank trains in each of its micro-batches: `plan(...)[rank][micro_batch]` is a list of rows.

    The number of micro-batches is that of first-fit decreasing (at most 11/9 of the fewest possible), raised to a
    multiple of `ranks`; then the rows are spread so that the loads are as even as they get, longest row first onto the
    least loaded micro-batch. Every rank has the same number of micro-batches, and those with the same number have like
    loads, because ranks wait for each other in each of them. A micro-batch may be empty when there are fewer rows
    than places. A row longer than `budget` has one to itself. The same arguments give the same plan.
    """
    if budget < 1:
        raise ValueError(f"train.tokens_per_microbatch={budget} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins = _first_fit(order, lengths, budget)
    count = max(1, -(-len(bins) // ranks)) * ranks
    even = _even(order, lengths, budget, count)
    if even is None:  # the even spread broke the budget where first-fit keeps it: rare, and then the budget counts
        even = bins + [[] for _ in range(count - len(bins))]
    even.sort(key=lambda rows: (-sum(lengths[row] for row in rows), rows))
    plans: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        # back and forth, so that no rank always takes the largest of a round
        turn = range(ranks) if (start // ranks) % 2 == 0 else range(ranks - 1, -1, -1)
        for offset, rank in enumerate(turn):
            plans[rank].append(sorted(even[start + offset]))
    return plans


def _first_fit(order: list[int], lengths: Seq[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for row in order:
        for i, space in enumerate(free):
            if lengths[row] <= space:
                bins[i].append(row)
                free[i] -= lengths[row]
                break
        else:
            bins.append([row])
            free.append(budget - lengths[row])
    return bins


def _even(order: list[int], lengths: Seq[int], budget: int, count: int) -> list[list[int]] | None:
    heap = [(0, i) for i in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for row in order:
        load, i = heapq.heappop(heap)
        if load and load + lengths[row] > budget:
            return None
        bins[i].append(row)
        heapq.heappush(heap, (load + lengths[row], i))
    return bins


def pack(
    sequences: Seq[Sequence],
    *,
    tokens_per_microbatch: int,
    context: int,
    pad_to: int | None = None,
    share_prompts: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """The micro-batches of one rank, on the CPU. `rows` counts in `sequences`.

    `share_prompts` keeps sequences of one prompt together as far as the budget allows, and has their prompt once.

    `pad_to` fills T up to a multiple of this number, which compiled layers want; None adds no token. An empty
    micro-batch (see `plan`) has one token, no sequence and N = 0: its loss is 0 and its backward pass touches every
    parameter, as the other ranks' do.

    Raises ValueError for a sequence longer than the model's `context`.
    """
    for row, s in enumerate(sequences):
        assert min(len(s.prompt_ids), len(s.completion_ids)) > 0, f"row {row}: prompt or completion is empty"
        assert len(s.trained()) == len(s.sampler_logprobs) == len(s.lags), f"row {row}: one entry per sampled token"
        if len(s) > context:
            raise ValueError(
                f"row {row} has {len(s)} tokens ({len(s.prompt_ids)} prompt + {len(s.completion_ids)} completion), "
                f"the model's context is {context}: lower data.max_prompt_tokens or data.max_tokens"
            )
    if share_prompts:
        units = _units(sequences, tokens_per_microbatch)
    else:
        units = [[row] for row in range(len(sequences))]
    sizes = [len(sequences[rows[0]].prompt_ids) + sum(len(sequences[r].completion_ids) for r in rows) for rows in units]
    planned = plan(sizes, tokens_per_microbatch, ranks)[rank]
    rows_by_microbatch = [sorted(row for unit in chosen for row in units[unit]) for chosen in planned]
    return [_pack_one(sequences, rows, pad_to, share_prompts) for rows in rows_by_microbatch]


def _units(sequences: Seq[Sequence], budget: int) -> list[list[int]]:
    """Rows of one prompt together, as many as the budget takes with the prompt counted once."""
    units: list[list[int]] = []
    latest: dict[tuple[int, ...], tuple[int, int]] = {}  # prompt -> its newest unit, tokens in it
    for row, s in enumerate(sequences):
        key = tuple(s.prompt_ids)
        unit, size = latest.get(key, (-1, budget))
        if size + len(s.completion_ids) > budget:
            unit, size = len(units), len(s.prompt_ids)
            units.append([])
        units[unit].append(row)
        latest[key] = unit, size + len(s.completion_ids)
    return units


def join(shards: Seq[MicroBatch]) -> MicroBatch:
    """One micro-batch of those that the ranks compute at once (the same number of each one's `pack`), end to end."""
    starts_T = np.cumsum([0, *(len(mb.ids_T) for mb in shards)]).tolist()
    starts_F = np.cumsum([0, *(int(mb.cu_seqlens[-1]) for mb in shards)]).tolist()
    starts_B = np.cumsum([0, *(mb.num_sequences for mb in shards)]).tolist()

    def cat(name: str, shifts: Seq[int] = ()) -> Tensor:
        values = [getattr(mb, name) for mb in shards]
        return torch.cat([x + shift for x, shift in zip(values, shifts, strict=False)] if shifts else values)

    borders = [mb.cu_seqlens[1:] + start for mb, start in zip(shards, starts_F, strict=False)]
    shared = shards[0].unfold_F is not None
    return MicroBatch(
        ids_T=cat("ids_T"),
        positions_T=cat("positions_T"),
        cu_seqlens=torch.cat([shards[0].cu_seqlens[:1], *borders]),
        max_seqlen=max(mb.max_seqlen for mb in shards),
        predict_N=cat("predict_N", starts_T),
        targets_N=cat("targets_N"),
        sequence_N=cat("sequence_N", starts_B),
        sampler_logprobs_N=cat("sampler_logprobs_N"),
        advantages_N=cat("advantages_N"),
        weights_N=cat("weights_N"),
        lag_N=cat("lag_N"),
        rows=[row for mb in shards for row in mb.rows],
        num_sequences=starts_B[-1],
        lengths=[length for mb in shards for length in mb.lengths],
        unfold_F=cat("unfold_F", starts_T) if shared else None,
        fold_T=cat("fold_T", starts_F) if shared else None,
        shards=list(shards),
    )


def _pack_one(sequences: Seq[Sequence], rows: list[int], pad_to: int | None, share_prompts: bool) -> MicroBatch:
    chosen = [sequences[row] for row in rows]
    places = [s.trained() for s in chosen]
    trained = [len(p) for p in places]
    ids: list[int] = []
    positions: list[int] = []
    in_T: list[np.ndarray] = []  # of each sequence: where its tokens are
    prompts: dict[tuple[int, ...], int] = {}
    for s in chosen:
        P, C = len(s.prompt_ids), len(s.completion_ids)
        start = prompts.get(tuple(s.prompt_ids)) if share_prompts else None
        if start is None:
            start = prompts[tuple(s.prompt_ids)] = len(ids)
            ids += s.prompt_ids
            positions += range(P)
        in_T.append(np.concatenate([np.arange(start, start + P), np.arange(len(ids), len(ids) + C)]))
        ids += s.completion_ids
        positions += range(P, P + C)
    padding = max(1 - len(ids), 0)
    if pad_to is not None:
        padding = max(padding, -len(ids) % pad_to)
    # token j of a completion is predicted from the position before it
    predict = [
        span[np.asarray(p, np.int64) + (len(s.prompt_ids) - 1)] for span, s, p in zip(in_T, chosen, places, strict=True)
    ]
    if padding:
        in_T.append(np.arange(len(ids), len(ids) + padding))
        ids += [0] * padding
        positions += range(padding)
    spans = [len(span) for span in in_T]
    unfold_F = np.concatenate(in_T).astype(np.int64)
    fold_T = np.empty(len(ids), np.int64)
    fold_T[unfold_F[::-1]] = np.arange(len(unfold_F))[::-1]  # the first of its places
    repeats = torch.tensor(trained, dtype=torch.int64)
    return MicroBatch(
        ids_T=torch.tensor(ids, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *spans]).astype(np.int32)),
        max_seqlen=max(spans),
        predict_N=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *predict]).astype(np.int64)),
        targets_N=torch.tensor(
            [s.completion_ids[i] for s, p in zip(chosen, places, strict=True) for i in p], dtype=torch.int64
        ),
        sequence_N=torch.arange(len(rows)).repeat_interleave(repeats),
        sampler_logprobs_N=torch.tensor([x for s in chosen for x in s.sampler_logprobs], dtype=torch.float32),
        advantages_N=torch.tensor([s.advantage for s in chosen], dtype=torch.float32).repeat_interleave(repeats),
        weights_N=torch.tensor([s.weight for s in chosen], dtype=torch.float32).repeat_interleave(repeats),
        lag_N=torch.tensor([x for s in chosen for x in s.lags], dtype=torch.int64),
        rows=rows,
        num_sequences=len(rows),
        lengths=trained,
        unfold_F=torch.from_numpy(unfold_F) if share_prompts else None,
        fold_T=torch.from_numpy(fold_T) if share_prompts else None,
    )
