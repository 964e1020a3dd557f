"""Law 3 over the whole loop: the ids sent and sampled are those that are trained, bit for bit (CASES 1, 27)."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fake_faults import Fault, chosen
from fake_server import FakeServer
from loop import Scorer, Stream, loop
from tiny import save_tiny_model, tiny_tokenizer

from grpo.batch import MicroBatch, Sequence


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_ids_that_no_tokenizer_gives_are_trained_as_they_were_sampled(tmp_path: Path, pad_is_eos: bool) -> None:
    """The letters of one piece, an end token in the prompt (SmolLM2's pad token too), one behind the answer."""
    model_dir = save_tiny_model(tmp_path / "model", pad_is_eos=pad_is_eos)
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos)
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    assert (tokenizer.pad_token_id == eos) is pad_is_eos
    ids = [*tokenizer.convert_tokens_to_ids(list("hello")), eos]
    assert tokenizer.encode(tokenizer.decode(ids[:-1])) != ids[:-1]
    logprobs = [-1.5 - 0.25 * i for i in range(len(ids))]
    prompts = [[eos, 2 + i, eos, 9] for i in range(4)]
    rewards = itertools.count()
    sequences: list[Sequence] = []
    micro_batches: list[MicroBatch] = []
    with (
        FakeServer(model_dir) as server,
        loop(
            [server.url],
            model_dir,
            tmp_path / "run",
            steps=2,
            stream=Stream(lambda index: prompts[index]),
            scorer=Scorer(lambda _: float(next(rewards))),
        ) as trainer,
    ):
        policy: Any = trainer.step_fn.policy
        original = policy.pack

        def pack(given: list[Sequence], **options: Any) -> list[MicroBatch]:
            made: list[MicroBatch] = original(given, **options)
            if any(s.weight for s in given):  # no probe of a proof
                sequences.extend(given)
                micro_batches.extend(made)
            return made

        policy.pack = pack
        rollout = Fault(
            "generate", edit=chosen(ids, logprobs), when=lambda c: not c.body["request_id"].startswith("sample-")
        )
        server.add_fault(rollout)
        trainer.run()
        sent = [c.body["token_ids"] for c in server.requests() if not c.body["request_id"].startswith("sample-")]

    assert len(sequences) == 2 * 2 * 4
    assert sorted(s.prompt_ids for s in sequences) == sorted(sent) == sorted(p for p in prompts for _ in range(4))
    assert all((s.completion_ids, s.sampler_logprobs, s.mask) == (ids, logprobs, None) for s in sequences)
    for mb in micro_batches:
        borders = mb.cu_seqlens.tolist()
        for row in range(mb.num_sequences):
            packed = mb.ids_T[borders[row] : borders[row + 1]].tolist()
            assert (packed[:4] in prompts, packed[4:]) == (True, ids)
            mine_N = mb.sequence_N == row
            assert mb.targets_N[mine_N].tolist() == ids, (
                "every sampled token, the end token too, and none of the prompt"
            )
            assert mb.sampler_logprobs_N[mine_N].tolist() == logprobs
            assert (mb.weights_N[mine_N] > 0).all()
    (*_, last) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert last["tokens/trained"] == last["tokens/generated"] == 2 * 2 * 4 * len(ids)
