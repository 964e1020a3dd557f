"""The sync is proven, not assumed (law 8): after a sync every server samples a few probes, labels their tokens with the
new version, and gives them the logprobs that the trainer's own weights give.

A server that answered 200 and changed nothing, or changed all but the head, differs by its lag; how much depends on the
learning rate, so the proof at the first sync of a run, where the server comes from its own files, catches wrong names,
shapes and dtypes, and the later ones what has drifted since.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo.batch import Sequence
from grpo.model import Policy
from grpo.rollout.loader import Loader
from grpo.sync.verify import LogprobsDiffer, verify
from grpo.types import Prompt, Sampling

PROBES, PROMPT_TOKENS, PROBE_TOKENS = 8, 24, 2


@dataclass(slots=True)
class Prover:
    """policy, loader: whose logprobs are compared. urls: every server is asked. temperature: the rollouts' own.

    context: tokens that a server takes, prompt and completion: a run launches them with room for its own alone.
    vocab: ids below it are drawn (a head may have more rows than the tokenizer has tokens, which a server refuses).
    dtype: of the servers; it decides what counts as equal. suspects: which weights of a server are off, for the error.
    """

    policy: Policy
    loader: Loader
    urls: list[str]
    context: int
    vocab: int
    temperature: float
    dtype: str
    seed: int
    timeout: float
    suspects: Callable[[str], str] = lambda url: ""

    def __call__(self, version: int, urls: list[str] | None = None) -> dict[str, float]:
        """Asks these servers; all, if none are named. Raises SyncNotProven; else
        {"sync/probe_max": ..., "sync/probe_mean": ...}, |logprob difference| in nats."""
        prompts = self._prompts(version)
        sampling = Sampling(self.temperature, PROBE_TOKENS, seed=None)
        worst, total, count = 0.0, 0.0, 0
        for url in urls if urls is not None else self.urls:
            groups = self.loader.sample(prompts, sampling, 1, self.timeout, probe=True, url=url)
            sequences = [
                Sequence(g.prompt.token_ids, c.token_ids, c.logprobs, [0] * c.tokens, 0.0, 0.0)
                for g in groups
                for c in g.completions
            ]
            ours: list[float] = []
            theirs: list[float] = []
            for mb in self.policy.pack(sequences, tokens_per_microbatch=4096):
                with torch.no_grad():
                    logprobs_N = self.policy.logprobs(mb.to(self.policy.device), self.temperature)[0]
                ours += logprobs_N.tolist()
                theirs += mb.sampler_logprobs_N.tolist()
            versions = [v for g in groups for c in g.completions for v in c.versions]
            try:
                verify(ours=ours, theirs=theirs, versions=versions, version=version, dtype=self.dtype, url=url)
            except LogprobsDiffer as error:
                raise LogprobsDiffer(f"{error}. {self.suspects(url)}") from None
            differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            worst, total, count = max(worst, *differences), total + sum(differences), count + len(differences)
        return {"sync/probe_max": worst, "sync/probe_mean": total / count}

    def _prompts(self, version: int) -> list[Prompt]:
        """Random ids: every layer and every position takes part. New ones each time: a cache cannot answer for us."""
        draw = random.Random(f"{self.seed}/{version}")
        length = max(1, min(PROMPT_TOKENS, min(self.context, self.policy.context) - PROBE_TOKENS))
        vocab = min(self.vocab, self.policy.vocab_size)
        return [Prompt(-1, "probe", "", [draw.randrange(vocab) for _ in range(length)], {}) for _ in range(PROBES)]
