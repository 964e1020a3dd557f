"""A prompt that several sequences share is computed once: same logprobs and gradients as without, in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import CONFIGS, reference_varlen
from tiny import save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from grpo.attention import packed_attention, packing
from grpo.batch import MicroBatch, Sequence, join, pack
from grpo.model import Policy


def sequence(prompt: list[int], completion: list[int], mask: list[bool] | None = None) -> Sequence:
    n = len(completion) if mask is None else sum(mask)
    return Sequence(prompt, completion, [-0.1 * i for i in range(n)], [0] * n, 0.5, 0.25, mask)


def test_two_groups_by_hand() -> None:
    rows = [sequence([5, 6], [7, 8]), sequence([5, 6], [9]), sequence([3], [4, 4])]
    (mb,) = pack(rows, tokens_per_microbatch=16, context=16, share_prompts=True, pad_to=4)
    assert mb.ids_T.tolist() == [5, 6, 7, 8, 9, 3, 4, 4]
    assert mb.positions_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert mb.unfold_F is not None
    assert mb.fold_T is not None
    assert mb.unfold_F.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    assert mb.fold_T.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert mb.cu_seqlens.tolist() == [0, 4, 7, 10]
    # 7 and 9 are both predicted at the one last token of their prompt
    assert mb.predict_N.tolist() == [1, 2, 1, 5, 6]
    assert mb.targets_N.tolist() == [7, 8, 9, 4, 4]
    assert (mb.max_seqlen, mb.lengths) == (4, [2, 1, 2])


tokens = st.lists(st.integers(2, 9), min_size=1, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> list[Sequence]:
    prompts = draw(st.lists(tokens, min_size=1, max_size=3))
    rows = []
    for _ in range(draw(st.integers(1, 10))):
        completion = draw(tokens)
        mask = [True, *(draw(st.booleans()) for _ in completion[1:])]
        rows.append(sequence(draw(st.sampled_from(prompts)), completion, mask))
    return rows


@settings(deadline=None)
@given(rows=batches(), budget=st.integers(1, 40), pad_to=st.sampled_from([None, 8]), ranks=st.integers(1, 3))
def test_every_sequence_can_be_read_off_in_full(
    rows: list[Sequence], budget: int, pad_to: int | None, ranks: int
) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        given_to = {"context": 20, "pad_to": pad_to, "rank": rank, "ranks": ranks, "share_prompts": True}
        for mb in pack(rows, tokens_per_microbatch=budget, **given_to):  # type: ignore[arg-type]
            check(mb, rows, budget)
            seen += mb.rows
    assert sorted(seen) == list(range(len(rows)))


def check(mb: MicroBatch, rows: list[Sequence], budget: int) -> None:
    assert mb.unfold_F is not None
    assert mb.fold_T is not None
    assert mb.unfold_F[mb.fold_T].tolist() == list(range(len(mb.ids_T)))
    ids_F, positions_F, borders = mb.ids_T[mb.unfold_F], mb.positions_T[mb.unfold_F], mb.cu_seqlens.tolist()
    assert len(ids_F) == borders[-1]
    for row, a, b in zip(mb.rows, borders[:-1], borders[1:], strict=False):
        assert ids_F[a:b].tolist() == rows[row].prompt_ids + rows[row].completion_ids
        assert positions_F[a:b].tolist() == list(range(b - a))
    for place, row in enumerate(mb.rows):
        s, mine_N = rows[row], mb.sequence_N == place
        assert mb.targets_N[mine_N].tolist() == [s.completion_ids[i] for i in s.trained()]
        read = [(s.prompt_ids + s.completion_ids)[len(s.prompt_ids) - 1 + i] for i in s.trained()]
        assert mb.ids_T[mb.predict_N[mine_N]].tolist() == read
        want = [len(s.prompt_ids) - 1 + i for i in s.trained()]
        assert mb.positions_T[mb.predict_N[mine_N]].tolist() == want
    chosen = [rows[row] for row in mb.rows]
    prompts = {tuple(s.prompt_ids) for s in chosen}
    computed = sum(map(len, prompts)) + sum(len(s.completion_ids) for s in chosen)
    assert computed <= len(mb.ids_T) <= max(computed, 1) + 7  # each prompt once; the rest is padding
    assert computed <= budget or len(chosen) == 1


def group_rows() -> list[Sequence]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for p, completions in ((9, [5, 2, 7]), (1, [3, 1]), (12, [4]), (4, [8, 8, 1, 6])):
        prompt = torch.randint(2, 50, (p,), generator=draw).tolist()
        for c in completions:
            ids = torch.randint(2, 50, (c,), generator=draw).tolist()
            old = (-torch.rand(c, generator=draw) * 3).tolist()
            rows.append(Sequence(prompt, ids, old, [0] * c, float(torch.randn((), generator=draw)), 1 / 44))
    return rows


@pytest.fixture(scope="module", params=["tied", "untied", "mistral window", "qwen3 mixed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    if request.param in CONFIGS:  # layers with a sliding window
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[request.param])).save_pretrained(path)
        return path
    return save_tiny_model(path, tied=request.param == "tied", max_length=64)


def computed(
    policy: Policy, budget: int, share: bool, pad_to: int | None
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Logprobs and entropies of each row, and the gradients of a loss with an entropy bonus."""
    policy.model.zero_grad()
    found = {}
    packed = policy.pack(group_rows(), tokens_per_microbatch=budget, pad_to=pad_to, share_prompts=share)
    for mb in packed:
        logprobs_N, entropy_N = policy.logprobs(mb, 0.7, entropy_grad=True)
        ratio_N = torch.exp((logprobs_N - mb.sampler_logprobs_N).clamp(-20, 2))
        (-(mb.weights_N * (ratio_N * mb.advantages_N + 0.01 * entropy_N)).sum()).backward()
        values = torch.stack([logprobs_N, entropy_N], 1).detach()
        found |= dict(zip(mb.rows, values.split(mb.lengths), strict=True))
    return found, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("budget", "pad_to"), [(500, None), (500, 128), (20, None), (20, 16), (1, None)])
def test_shared_prompts_give_the_values_and_gradients_of_prompts_of_ones_own(
    folder: Path, budget: int, pad_to: int | None
) -> None:
    policy = Policy(folder, dtype="float64")
    alone, expected = computed(policy, 500, False, None)
    shared, gradients = computed(policy, budget, True, pad_to)
    assert sorted(shared) == sorted(alone) == list(range(10))
    for row, values in shared.items():
        torch.testing.assert_close(values, alone[row], rtol=0, atol=1e-10)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # the model's norms are float32 also here: a gradient is rounded once where it was rounded in every copy
        assert (gradient - expected[name]).abs().max() < 1e-6 * expected[name].abs().max(), name


def test_less_is_computed(folder: Path) -> None:
    policy = Policy(folder)
    (own,), (shared,) = (
        policy.pack(group_rows(), tokens_per_microbatch=500, share_prompts=share) for share in (False, True)
    )
    assert len(own.ids_T) - len(shared.ids_T) == 2 * 9 + 1 + 3 * 4


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_a_gpu_sees_the_sequences_in_full(window: int | None) -> None:
    """The way of CUDA with the kernel's definition in its place, against the way of the CPU: values and gradients."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, left: int) -> Tensor:
        outs = []
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            borders = torch.tensor([0, b - a])
            back = torch.arange(b - a)[:, None] - torch.arange(b - a)
            seen = (back >= 0) & (back <= left if left >= 0 else back >= 0)
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b].repeat_interleave(2, 1)) * scale
            probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", probs, v[a:b].repeat_interleave(2, 1))
            exact = reference_varlen(q[a:b], k[a:b], v[a:b], borders, borders, longest, longest, left, scale)
            torch.testing.assert_close(out, exact)
            outs.append(out)
        return torch.cat(outs)

    class Layer(torch.nn.Module):
        is_causal = True

    (mb,) = pack(group_rows(), tokens_per_microbatch=500, context=64, share_prompts=True)
    T = len(mb.ids_T)
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, heads, T, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2)]
    weights = torch.randn(1, T, 4, 8, dtype=torch.float64, generator=draw)
    on_gpu = {
        "cu_seq_lens_q": mb.cu_seqlens,
        "max_length_q": 32,
        "packed_unfold_F": mb.unfold_F,
        "packed_fold_T": mb.fold_T,
        "kernel": kernel,
    }
    on_cpu = packing(mb.cu_seqlens, mb.max_seqlen, torch.float64, mb.unfold_F, mb.fold_T)
    results = []
    for way in (on_gpu, on_cpu):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        out, _ = packed_attention(Layer(), q, k, v, None, scaling=0.3, sliding_window=window, **way)  # type: ignore[arg-type]
        (out * weights).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    # the way of CUDA adds up in float32, the precision above that of its half-precision tensors
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_joined_shards_read_like_one_micro_batch() -> None:
    rows = group_rows()
    shards = [
        mb
        for rank in range(2)
        for mb in pack(rows, tokens_per_microbatch=500, context=64, share_prompts=True, rank=rank, ranks=2)
    ]
    whole = join(shards)
    check(whole, [rows[row] for row in range(len(rows))], 500)
    assert sorted(whole.rows) == list(range(len(rows)))


def test_a_model_that_looks_at_neighbours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that keeps sequences apart by their positions is right in a pack of whole sequences alone."""
    folder = save_tiny_model(tmp_path, max_length=64)
    Policy(folder).check_shared_prompts()
    forward = Qwen3DecoderLayer.forward

    def with_the_token_before(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = hidden_states.roll(1, dims=1) * (kwargs["position_ids"] > 0)[..., None]
        return forward(self, hidden_states + 0.5 * before, *args, **kwargs)

    monkeypatch.setattr(Qwen3DecoderLayer, "forward", with_the_token_before)
    policy = Policy(folder)  # whole sequences are fine
    with pytest.raises(ValueError, match=r"train\.share_prompts=true: .* 'qwen3' are .* off"):
        policy.check_shared_prompts()
