"""The proof of a sync (law 8): do the servers compute with the weights that the trainer has?"""

# Two engines with equal weights differ by rounding only. float32: 5e-7 was measured, a stale layer gives 1e-2 to 1.
# bfloat16: mean 0.007 (0.6B) to 0.031 (4B) was measured; single tokens of low probability go much further.
MOST = {"float32": 1e-3, "bfloat16": 1.5}
MEAN = {"float32": 2e-4, "bfloat16": 0.1}


class SyncNotProven(RuntimeError):  # noqa: N818
    """A server's answers are not those of the trainer's weights."""


class LogprobsDiffer(SyncNotProven):
    """With the right version and other logprobs: some weights are off."""


def verify(*, ours: list[float], theirs: list[float], versions: list[int], version: int, dtype: str, url: str) -> None:
    """Compare the logprobs (nats) of sampled probe tokens. Raises SyncNotProven, saying what is off and why it may be.

    ours: the trainer's; theirs: the server's; versions: the server's label of each token; dtype: of the server.
    """
    assert len(ours) == len(theirs) == len(versions) > 0
    if set(versions) != {version}:
        raise SyncNotProven(
            f"{url}: the probe's tokens are labelled with versions {sorted(set(versions))}, the trainer synced "
            f"{version}: the server was restarted, or somebody else syncs it"
        )
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    worst, mean = max(differences), sum(differences) / len(differences)
    if not (worst <= MOST[dtype] and mean <= MEAN[dtype]):  # NaN is not <= anything
        raise LogprobsDiffer(
            f"{url}: after the sync of version {version} the server's logprobs are not the trainer's: |difference| of "
            f"{len(differences)} probe tokens is {mean:.2g} on average and {worst:.2g} at most (nats), allowed are "
            f"{MEAN[dtype]:g} and {MOST[dtype]:g} in {dtype}. All calls answered 200. Usual reasons: weights that were "
            "not applied (all of them, or the tied head), a server of another model or dtype, a server without "
            "--logprobs-mode processed_logprobs"
        )
