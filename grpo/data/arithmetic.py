"""The built-in task: the last digit of the sum of six digits.

    problem   785392
    prompt    785392=
    direct    :4              right only by luck: a tiny model cannot add six digits in one step
    thinking  750324:4        running sums modulo 10 (7, 7+8, 15+5, ...), each one easy, then the answer

A policy learns it in seconds on a CPU by learning to think first, so every part of an asynchronous run can be watched
at work. Rows are computed, never stored, and no row depends on a run's seed: the problems are split once and for all
into training rows and held-out rows. Shuffling is left to the prompt stream.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import overload

# At most this many problems are kept out of training, and at most half of all problems.
RESERVED = 1024
# len() of a sequence must fit a machine word, so 10 ** digits has to.
MAX_DIGITS = 18


def answer(problem: str) -> str:
    """The right answer, one digit: the sum of the problem's digits modulo 10."""
    return str(sum(map(int, problem)) % 10)


def prompt(problem: str) -> str:
    """The text the policy is given."""
    return f"{problem}="


def direct_completion(problem: str) -> str:
    """The right completion that shows no work: `:4`."""
    return f":{answer(problem)}"


def thinking_completion(problem: str) -> str:
    """The right completion that shows the running sums modulo 10: `750324:4`."""
    running_sums = "".join(answer(problem[:end]) for end in range(1, len(problem) + 1))
    return running_sums + direct_completion(problem)


def given_answer(completion: str) -> str | None:
    """What a completion claims: all that follows its last colon, or None without a colon.

    The running sums are not looked at, so a policy may think in any way, or not at all.
    """
    _, colon, claimed = completion.rpartition(":")
    return claimed if colon else None


@cache
def _reserved_numbers(digits: int) -> tuple[int, ...]:
    """The held-out problems as numbers, in held-out order: distinct, and spread by a hash.

    A hash, because the random generators of Python and numpy may draw otherwise in another release: the held-out set
    must be the same wherever the warm start was made and a run is evaluated.
    """
    total = 10**digits
    numbers: dict[int, None] = {}
    draw = 0
    while len(numbers) < min(RESERVED, total // 2):
        digest = hashlib.sha256(f"arithmetic/{digits}/held-out/{draw}".encode()).digest()
        numbers[int.from_bytes(digest) % total] = None
        draw += 1
    return tuple(numbers)


class Rows(Sequence[dict[str, str]]):
    """A virtual sequence of rows `{"problem": "785392", "prompt": "785392=", "answer": "4"}`.

    `held_out` picks the first `count` held-out rows; otherwise these are all rows that are never held out, whatever
    the `count` of an evaluation, in numerical order.
    """

    def __init__(self, *, digits: int, held_out: bool, count: int) -> None:
        self._digits = digits
        self._held_out = held_out
        self._length = count
        self._reserved = _reserved_numbers(digits)
        # How many training problems come before each reserved one.
        self._training_before = [number - rank for rank, number in enumerate(sorted(self._reserved))]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, str]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, str] | list[dict[str, str]]:
        if isinstance(index, slice):
            return [self[i] for i in range(self._length)[index]]
        place = range(self._length)[index]  # negative indices and IndexError as for a list
        number = self._reserved[place] if self._held_out else place + bisect_right(self._training_before, place)
        problem = f"{number:0{self._digits}d}"
        return {"problem": problem, "prompt": prompt(problem), "answer": answer(problem)}

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[i] for i in range(self._length))


def train_rows(digits: int = 6) -> Rows:
    """Every problem that is never held out, in numerical order. ValueError for `digits` outside 1..18."""
    _check_digits(digits)
    return Rows(digits=digits, held_out=False, count=10**digits - len(_reserved_numbers(digits)))


def held_out_rows(count: int = 256, digits: int = 6) -> Rows:
    """The first `count` held-out problems: fixed, and none of them in `train_rows(digits)`.

    Raises ValueError for `digits` outside 1..18 and for a `count` beyond what is held out (1024, or half of all
    problems where that is less).
    """
    _check_digits(digits)
    most = len(_reserved_numbers(digits))
    if not 1 <= count <= most:
        raise ValueError(f"data.eval_rows={count}: with data.digits={digits}, 1 to {most} problems can be held out")
    return Rows(digits=digits, held_out=True, count=count)


def _check_digits(digits: int) -> None:
    if not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"data.digits={digits}: must be 1 to {MAX_DIGITS}")
