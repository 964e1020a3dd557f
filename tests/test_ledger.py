"""Law 6: one account for every token."""

import pytest

from grpo.ledger import Ledger
from grpo.types import Completion


def completion(tokens: int) -> Completion:
    return Completion(0, 0, [5] * tokens, [-1.0] * tokens, [0] * tokens, "stop")


def test_the_accounts_add_up_by_kind() -> None:
    ledger = Ledger()
    ledger.receive(100)
    ledger.settle("trained", 40)
    ledger.settle("masked:truncated", 10)
    ledger.settle("discarded:zero_variance:all_right", 20)
    ledger.settle("discarded:refused", 5)
    assert ledger.totals() == {"generated": 100, "trained": 40, "masked": 10, "discarded": 25, "in_flight": 25}
    assert ledger.accounts()["discarded:refused"] == 5


def test_a_completion_is_settled_once() -> None:
    ledger = Ledger()
    ledger.receive(3)
    c = completion(3)
    ledger.settle_completion(c, "trained")
    with pytest.raises(AssertionError, match="settled twice"):
        ledger.settle_completion(c, "masked:truncated")


def test_more_settled_than_generated_is_refused() -> None:
    ledger = Ledger()
    ledger.receive(3)
    with pytest.raises(AssertionError, match="more tokens settled"):
        ledger.settle("trained", 4)


@pytest.mark.parametrize("account", ["lost", "masked", "discarded:", "in_flight"])
def test_an_unknown_account_is_refused(account: str) -> None:
    ledger = Ledger()
    ledger.receive(3)
    with pytest.raises(AssertionError, match="no such account"):
        ledger.settle(account, 1)


def test_a_resumed_ledger_goes_on_with_its_accounts() -> None:
    ledger = Ledger({"trained": 7, "masked:truncated": 2})
    assert ledger.totals() == {"generated": 9, "trained": 7, "masked": 2, "discarded": 0, "in_flight": 0}
