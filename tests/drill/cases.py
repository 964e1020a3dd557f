"""What goes wrong in a run of the drill. Each kind draws its details from the run's random generator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from fake_faults import Call, Fault, chosen, finish, huge, logprob, missing, null, short, version

CALLS = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache", "resume")
STEPS, GROUPS, SIZE = 4, 2, 4
REQUESTS = STEPS * GROUPS * SIZE


@dataclass
class Case:
    """faults: of the first server. ends: the run must end so; "any": it may, as long as the laws hold.
    same: what it trains must be what an unbroken run trains (of one server at max_staleness=0)."""

    kind: str
    faults: list[Fault] = field(default_factory=list)
    ends: str = "finished"
    same: bool = True
    restarts: int = 0
    comes_back: bool = False
    full: str | None = None  # a file of the run folder that finds no room
    reward_raises: bool = False


def rollout(call: Call) -> bool:
    """Whether a request is one of training, and no probe of a proof."""
    return not str(call.body["request_id"]).startswith("sample-")


def errors(draw: Random) -> Case:
    """500s and the like, fewer in a row than there are tries."""
    after = draw.sample(range(REQUESTS), 3)
    status = draw.choice([500, 502, 503, 429, 408])
    return Case("5xx on generate", [Fault("generate", status=status, after=n, times=1) for n in after])


def drops(draw: Random) -> Case:
    late = draw.random() < 0.5
    cut = draw.choice([None, 0.3])
    faults = [Fault("generate", drop=cut is None, cut=cut, late=late, after=draw.randrange(REQUESTS), times=1)]
    return Case("dropped socket", faults)


def stalls(draw: Random) -> Case:
    call = draw.choice(["generate", *CALLS])
    return Case("stall that ends", [Fault(call, delay=draw.uniform(0.05, 0.4), after=draw.randrange(3), times=2)])


def hang(draw: Random) -> Case:
    """A request that is never answered: its deadline strikes, and it is sent again."""
    return Case(
        "request that hangs", [Fault("generate", hang=True, when=rollout, after=draw.randrange(REQUESTS), times=1)]
    )


def malformed(draw: Random) -> Case:
    edits = [missing("token_ids"), null("logprobs"), short("logprobs"), logprob(float("nan")), logprob(None)]
    edits += [null("weight_versions"), short("weight_versions"), chosen([]), chosen([5, 99_999]), finish("odd")]
    edit, times = draw.choice(edits), draw.randint(1, 3)
    fault = Fault("generate", edit=edit, when=rollout, after=draw.randrange(REQUESTS), times=times)
    return Case("malformed answer", [fault], same=False)


def no_json(draw: Random) -> Case:
    return Case("answer that is no JSON", [Fault("generate", raw=b"{", after=draw.randrange(REQUESTS), times=2)])


def aborted(draw: Random) -> Case:
    return Case("aborted", [Fault("generate", edit=finish("abort"), after=draw.randrange(REQUESTS), times=2)])


def oversized(draw: Random) -> Case:
    return Case("oversized answer", [Fault("generate", edit=huge(2), after=draw.randrange(REQUESTS))], ends="failed")


def foreign(draw: Random) -> Case:
    label = version(draw.choice(["default", "999"]))
    fault = Fault("generate", edit=label, when=rollout, after=draw.randrange(REQUESTS), times=1)
    return Case("tokens of other weights", [fault], restarts=2)


def death(draw: Random) -> Case:
    call = draw.choice(["generate", "generate", "generate", "weight_info", *CALLS])
    after = draw.randrange(REQUESTS) if call == "generate" else draw.randrange(STEPS)
    fault = Fault(call, die=True, late=draw.random() < 0.5, after=after, times=1)
    return Case("server dies, comes back", [fault], restarts=1, comes_back=True)


def death_for_good(draw: Random) -> Case:
    call = draw.choice(["generate", *CALLS])
    fault = Fault(call, die=True, after=draw.randrange(8 if call == "generate" else 2), times=1)
    return Case("server dies for good", [fault], ends="failed", restarts=draw.randint(0, 1))


def refused_sync(draw: Random) -> Case:
    return Case("sync refused", [Fault(draw.choice(CALLS), status=500, after=draw.randrange(3))], ends="failed")


def broken_sync(draw: Random) -> Case:
    """A connection breaks under a call of a sync, which the server has obeyed or not."""
    fault = Fault(draw.choice(CALLS), drop=True, late=draw.random() < 0.5, after=draw.randrange(3), times=1)
    return Case("connection broken in a sync", [fault])


def hanging_sync(draw: Random) -> Case:
    return Case("sync that hangs", [Fault(draw.choice(CALLS), hang=True, after=draw.randrange(3))], ends="failed")


def lying_sync(draw: Random) -> Case:
    lie = draw.choice(["nothing", "all_but_head"])
    return Case("sync that lies", [Fault("update_weights", apply=lie, after=1)], ends="failed")


def full_disk(draw: Random) -> Case:
    return Case("disk full", full=draw.choice(["metrics.jsonl", "rollouts.jsonl"]), ends="failed")


def broken_reward(draw: Random) -> Case:
    return Case("reward raises", reward_raises=True, ends="failed")


def everything(draw: Random) -> Case:
    """Several at once: only the laws are asked for, however it ends."""
    cases = [draw.choice(KINDS[:-1])(draw) for _ in range(3)]
    faults = [fault for case in cases for fault in case.faults]
    return Case("three at once", faults, ends="any", same=False, restarts=1, comes_back=True)


KINDS: list[Callable[[Random], Case]] = [
    errors,
    drops,
    stalls,
    hang,
    malformed,
    no_json,
    aborted,
    oversized,
    foreign,
    death,
    death_for_good,
    refused_sync,
    broken_sync,
    hanging_sync,
    lying_sync,
    full_disk,
    broken_reward,
    everything,
]
