"""Admission and ledger under any order of events: a machine of states that hypothesis drives (laws 1, 2, 6)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo.ledger import Ledger
from grpo.rollout.admission import Admission
from grpo.types import Completion

SIZE = 2


class Stream(RuleBasedStateMachine):
    """Groups of two requests: answered in any order, cut off and sent again, discarded, consumed in stream order; the
    trainer syncs, is killed and resumed."""

    unanswered = Bundle("unanswered")

    @initialize(staleness=st.integers(0, 3), per_step=st.integers(1, 3), inflight=st.integers(1, 9))
    def begin(self, staleness: int, per_step: int, inflight: int) -> None:
        self.staleness, self.per_step, self.inflight = staleness, per_step, inflight
        self.consumed = self.version = self.places = 0
        self.start(Ledger())

    def start(self, ledger: Ledger) -> None:
        self.admission = Admission(
            groups_per_step=self.per_step,
            max_staleness=self.staleness,
            max_inflight=self.inflight,
            total_groups=10**6,
            version=self.version,
            places=self.places,
        )
        self.ledger = ledger
        self.saved = ledger.accounts()
        self.admitted = self.consumed
        self.life = getattr(self, "life", 0) + 1
        self.missing: dict[int, int] = {}  # group -> answers still to come
        self.held: dict[int, list[Completion]] = {}  # group -> answers that are here and not consumed
        self.discarded: set[int] = set()
        self.born: dict[int, int] = {}  # group -> version at its admission: the oldest that may sample it

    @rule(target=unanswered)
    def admit(self) -> tuple[int, int]:
        if self.admission.may_admit():
            self.admission.admit(SIZE)
            self.missing[self.admitted], self.held[self.admitted] = SIZE, []
            self.born[self.admitted] = self.version
            self.admitted += 1
        return self.life, self.admitted - 1

    @rule(request=unanswered, tokens=st.integers(1, 5), version_lag=st.integers(0, 9))
    def answer(self, request: tuple[int, int], tokens: int, version_lag: int) -> None:
        """One answer to a request of this group; sampled from its admission on, at the oldest."""
        life, group = request
        if life != self.life or not self.missing.get(group):
            return
        self.missing[group] -= 1
        self.admission.close_request()
        self.ledger.receive(tokens)
        version = max(self.born[group], self.version - version_lag)
        index = len(self.held[group])
        self.held[group].append(Completion(group, index, [5] * tokens, [-1.0] * tokens, [version] * tokens, "stop"))

    @precondition(lambda self: any(n == 0 for n in self.missing.values()))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        done = sorted(g for g, n in self.missing.items() if n == 0 and g not in self.discarded)
        if done:
            self.discarded.add(data.draw(st.sampled_from(done)))
            self.admission.hand_back()

    @rule()
    def train(self) -> None:
        """A step, when the next groups in order are there; then a sync."""
        batch: list[int] = []
        group, kept = self.consumed, 0
        while kept < self.per_step and self.missing.get(group) == 0:
            batch.append(group)
            kept += group not in self.discarded
            group += 1
        if kept < self.per_step:
            return
        for number in batch:
            for completion in self.held.pop(number):
                if number not in self.discarded:
                    lag = self.version - completion.version_first
                    assert 0 <= lag <= self.staleness, f"group {number} has lag {lag}"
                outcome = "discarded:zero_variance" if number in self.discarded else "trained"
                self.ledger.settle_completion(completion, outcome)
            del self.missing[number]
        self.consumed, self.places = group, self.places + kept
        self.version += 1
        self.admission.advance(self.version)
        self.saved = self.ledger.accounts()

    @rule()
    def killed_and_resumed(self) -> None:
        """At any moment: what was in flight is forgotten, what was consumed is not."""
        self.start(Ledger(self.saved))

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        totals = self.ledger.totals()
        held = sum(len(c.token_ids) for completions in self.held.values() for c in completions)
        assert totals["in_flight"] == held
        assert totals["generated"] == totals["trained"] + totals["masked"] + totals["discarded"] + held

    @invariant()
    def nothing_starts_too_early_or_is_held_up(self) -> None:
        if not hasattr(self, "admission"):
            return
        admission = self.admission
        assert admission.open_requests == sum(self.missing.values())
        running = self.admitted - self.consumed - len(self.discarded & self.missing.keys())
        assert admission.places == self.places + running
        assert admission.places <= (self.version + 1 + self.staleness) * self.per_step
        if not any(self.missing.values()):  # nothing is open: a step's groups are here, or one may start
            ready = sum(g not in self.discarded for g in self.missing)
            assert ready >= self.per_step or admission.may_admit()


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
