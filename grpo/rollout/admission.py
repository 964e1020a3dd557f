"""Which groups may start: pacing by position, so that no completion can ever be too old (laws 1 and 2).

The trainer consumes groups in stream order, `groups_per_step` of them a step, and step t is trained at version t (the
number of weight syncs since version 0). A group in place p is therefore trained at version p // groups_per_step. If it
starts only while

    p < (version + 1 + max_staleness) * groups_per_step

then its lag, version trained - version sampled, is at most max_staleness: however slow it is, however long it waits
in the buffer, and also right after a resume. Nothing is ever thrown away for being late.

A group that leaves the stream without being trained hands its place back: every later group moves one place forward
(its lag can only fall) and one more group may start.

No clock, no network, no thread: this object is called from the loader's event loop only.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Counts places and open requests.

    groups_per_step: groups that one training step consumes.
    max_staleness: largest allowed lag S, in versions; 0 is synchronous on-policy training.
    max_inflight: no new group starts while this many requests are open.
    total_groups: places that will ever be trained (steps * groups_per_step); generation past them would be waste.
    version: the trainer's current version; set again after each sync.
    places: places taken so far, trained ones included; after a resume, the ones trained before.
    """

    groups_per_step: int
    max_staleness: int
    max_inflight: int
    total_groups: int
    version: int = 0
    places: int = 0
    open_requests: int = 0

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step={self.groups_per_step}: at least 1")
        if self.max_staleness < 0:
            raise ValueError(f"rollout.max_staleness={self.max_staleness}: 0 (synchronous) or more")
        if self.max_inflight < 1:
            raise ValueError(f"rollout.max_inflight={self.max_inflight}: at least 1 request")

    @property
    def limit(self) -> int:
        """Places that may be taken at the current version."""
        return min((self.version + 1 + self.max_staleness) * self.groups_per_step, self.total_groups)

    def may_admit(self) -> bool:
        return self.places < self.limit and self.open_requests < self.max_inflight

    def admit(self, requests: int) -> None:
        """A group of this many requests starts."""
        assert self.may_admit(), "admit() without may_admit()"
        self.places += 1
        self.open_requests += requests

    def close_request(self) -> None:
        """One request of an admitted group has ended, in whatever way."""
        assert self.open_requests > 0, "more requests closed than opened"
        self.open_requests -= 1

    def hand_back(self) -> None:
        """An admitted group will not be trained."""
        assert self.places > 0, "more places handed back than taken"
        self.places -= 1

    def advance(self, version: int) -> None:
        """A weight sync has completed."""
        assert version >= self.version, f"version went back from {self.version} to {version}"
        self.version = version
