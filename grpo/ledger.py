"""The token ledger (law 6): every generated token is in exactly one account.

    generated = trained + masked + discarded + in flight

"Generated" is what an answer has brought to us; tokens of a request that was cut off (a dropped socket, a dead
server) are never seen and never counted, nor are observations, which an environment wrote. Evaluation has its own count
and never enters.

The loader's thread calls `receive`, the trainer's thread calls `settle`; both hold the lock.
"""

import threading
from collections import Counter

from grpo.types import IN_FLIGHT, TRAINED, Completion


class Ledger:
    def __init__(self, settled: dict[str, int] | None = None) -> None:
        """settled: accounts of the run that is resumed, as `accounts()` gave them; nothing is in flight then."""
        self.lock = threading.Lock()
        self._settled: Counter[str] = Counter(settled or {})
        self._generated = self._settled.total()

    def receive(self, tokens: int) -> None:
        """An answer has arrived."""
        with self.lock:
            self._generated += tokens

    def settle(self, outcome: str, tokens: int) -> None:
        """Tokens leave "in flight" for their last account: "trained", "masked:<why>" or "discarded:<why>"."""
        kind, _, why = outcome.partition(":")
        assert kind == TRAINED or (kind in ("masked", "discarded") and why), f"no such account: {outcome!r}"
        with self.lock:
            self._settled[outcome] += tokens
            assert self._settled.total() <= self._generated, "more tokens settled than generated"

    def settle_completion(self, completion: Completion, outcome: str) -> None:
        assert completion.outcome == IN_FLIGHT, f"settled twice: {completion.outcome}, then {outcome}"
        completion.outcome = outcome
        self.settle(outcome, completion.tokens)

    def accounts(self) -> dict[str, int]:
        """The settled accounts, for a checkpoint."""
        with self.lock:
            return dict(self._settled)

    def totals(self) -> dict[str, int]:
        """Cumulative `tokens/*` metrics; "in_flight" is what is left, compared with what is held by `check`."""
        with self.lock:
            kinds: Counter[str] = Counter()
            for outcome, tokens in self._settled.items():
                kinds[outcome.partition(":")[0]] += tokens
            return {
                "generated": self._generated,
                "trained": kinds["trained"],
                "masked": kinds["masked"],
                "discarded": kinds["discarded"],
                "in_flight": self._generated - self._settled.total(),
            }
