"""The order of an epoch as a pure function: which row stands at a place, without a list of all places.

A Feistel network over pairs (left, right) with row = left * side + right is a bijection whatever its round functions
are, so every row comes once an epoch. Its keys are hashes of (seed, epoch): the order is the same on every machine and
in every release of Python and numpy, any place of it costs microseconds, and a resume needs a place only.
"""

import hashlib
from functools import lru_cache
from math import isqrt

ROUNDS = 8  # four are enough for large sets; on three rows it takes eight for all orders to be equally frequent


def row_at(place: int, rows: int, seed: int, epoch: int) -> int:
    """The row (0 .. rows-1) at `place` (0 .. rows-1) of an epoch."""
    assert 0 <= place < rows
    side = isqrt(rows - 1) + 1  # side * side >= rows, with little to spare
    value = place
    while True:
        left, right = divmod(value, side)
        for step in range(0, ROUNDS, 2):
            left = (left + _hash(seed, epoch, step, right)) % side
            right = (right + _hash(seed, epoch, step + 1, left)) % side
        value = left * side + right
        if value < rows:  # else walk on: the cycle comes back below `rows`, at another row for each place
            return value


@lru_cache(maxsize=2**14)
def _hash(seed: int, epoch: int, step: int, value: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{step}/{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
