"""Several data sets at once, each with its own columns, template and rewards, mixed by weight.

Out of every BLOCK prompts a part has its share by weight, at places that depend on (seed, block) alone, and each part
is read in its own order, epoch after epoch. So any place of the mixture is found without going through those before.
A prompt that is held out in one part is trained on in none.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from grpo.data.base import Data, LoadedData
from grpo.data.order import row_at
from grpo.data.stream import Stream
from grpo.rewards import Rewards
from grpo.rewards.options import check_types
from grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from grpo.environments.hosted import Hosted
    from grpo.rollout.episode import Session

BLOCK = 1000


@dataclass(kw_only=True)
class Mixture:
    """`parts`: data sets by name. `weights`: shares of the prompts by name; a part without one has 1.
    max_prompt_tokens, max_tokens: the largest among the parts."""

    parts: dict[str, Any]
    max_prompt_tokens: int
    max_tokens: int
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "data")
        if not self.parts:
            raise ValueError("data.parts={}: name at least one data set")
        for name, part in self.parts.items():
            if not isinstance(part, Data):
                raise ValueError(f"data.parts.{name}: expected a data set (with a _target_), found {part!r}")
            if part.epochs is not None:
                raise ValueError(f"data.parts.{name}.epochs={part.epochs}: a mixture is endless; set train.steps")
            if "/" in name:
                raise ValueError(f"data.parts.{name}: a name without '/', please")
            for key in ("max_prompt_tokens", "max_tokens"):
                if getattr(part, key) > getattr(self, key):
                    raise ValueError(
                        f"data.{key}={getattr(self, key)}: less than data.parts.{name}.{key}={getattr(part, key)}"
                    )
        for name, weight in self.weights.items():
            if name not in self.parts:
                raise ValueError(f"data.weights.{name}: no such part; there are {', '.join(self.parts)}")
            if not weight > 0:
                raise ValueError(f"data.weights.{name}={weight}: must be above 0; leave the part out instead")

    def check(self) -> None:
        """Raises ValueError for what can be seen before anything is loaded."""
        self.rewards()
        for name, part in self.parts.items():
            try:
                part.check()
            except ValueError as error:
                raise ValueError(f"data.parts.{name}: {error}") from error

    def rewards(self) -> "MixtureRewards":
        """What scores each part's completions, not yet started."""
        return MixtureRewards({name: part.rewards() for name, part in self.parts.items()})

    def environments(self, tokenizer: Any, stop_ids: Collection[int]) -> "MixtureEnvironments | None":
        """Each part's own; None where no part has one."""
        made = {name: part.environments(tokenizer, stop_ids) for name, part in self.parts.items()}
        return MixtureEnvironments(made) if any(made.values()) else None

    def load(self, tokenizer: Any, seed: int) -> LoadedData:
        """Loads every part. Raises what a part raises."""
        loaded = {name: part.load(tokenizer, seed) for name, part in self.parts.items()}
        held_out = frozenset[bytes]().union(*(part.held_out for part in loaded.values()))
        streams: dict[str, Stream] = {}
        evals: dict[str, list[Prompt]] = {}
        report: dict[str, Any] = {}
        for name, part in loaded.items():
            assert isinstance(part.train, Stream)
            streams[name], removed = part.train.without(held_out)
            report[name] = part.report | ({"in_held_out_of_another_part": removed} if removed else {})
            for eval_name, prompts in part.evals.items():
                evals[f"{name}_{eval_name}"] = [_renamed(p, name, -1 - i) for i, p in enumerate(prompts, _count(evals))]
        quotas = shares([self.weights.get(name, 1.0) for name in streams], BLOCK)
        return LoadedData(MixedStream(streams, quotas, seed), evals, report, held_out)


@dataclass(slots=True)
class MixedStream:
    """`quotas`: prompts of each stream in a block of BLOCK, in the order of `streams`."""

    streams: dict[str, Stream]
    quotas: list[int]
    seed: int

    def prompt(self, index: int) -> Prompt | None:
        """The prompt at a place of the stream. Any place, any number of times."""
        block, place = divmod(index, BLOCK)
        part, rank = _layout(tuple(self.quotas), self.seed, block)[place]
        name = list(self.streams)[part]
        prompt = self.streams[name].prompt(block * self.quotas[part] + rank)
        assert prompt is not None, "the streams of a mixture are endless"
        return _renamed(prompt, name, index)


@lru_cache(maxsize=4)
def _layout(quotas: tuple[int, ...], seed: int, block: int) -> list[tuple[int, int]]:
    """For each place of a block: which part, and how many of that part come before it in the block."""
    owners = [part for part, quota in enumerate(quotas) for _ in range(quota)]
    seen: Counter[int] = Counter()
    layout = []
    for place in range(BLOCK):
        part = owners[row_at(place, BLOCK, seed, block)]
        layout.append((part, seen[part]))
        seen[part] += 1
    return layout


def shares(weights: list[float], total: int) -> list[int]:
    """`total` divided by weight into whole numbers, each at least 1, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for i in order[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total:  # parts that were raised to 1 are paid for by the largest
        counts[counts.index(max(counts))] -= 1
    return counts


def _renamed(prompt: Prompt, part: str, index: int) -> Prompt:
    return Prompt(index, f"{part}/{prompt.row}", prompt.text, prompt.token_ids, prompt.columns)


def _count(evals: dict[str, list[Prompt]]) -> int:
    return sum(map(len, evals.values()))


class MixtureEnvironments:
    """Begins each completion with the environment of the part that its prompt is from, if that has one."""

    def __init__(self, parts: "dict[str, Hosted | None]") -> None:
        self.parts = parts

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for hosted in self.parts.values():
                if hosted is not None:
                    stack.enter_context(hosted)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    async def begin(self, prompt: Prompt, count: int) -> "tuple[Prompt, list[Session | None]]":
        """As `Hosted.begin`."""
        hosted = self.parts[part_of(prompt)]
        return (prompt, [None] * count) if hosted is None else await hosted.begin(prompt, count)


class MixtureRewards:
    """Scores each completion with the rewards of the part that its prompt is from. Used as `Rewards` is."""

    def __init__(self, parts: dict[str, Rewards]) -> None:
        self.parts = parts
        self.weights: dict[str, float] = {}
        for part, rewards in parts.items():
            for name, weight in rewards.weights.items():
                if self.weights.setdefault(name, weight) != weight:
                    raise ValueError(
                        f"data.parts.{part}: its reward {name!r} has weight {weight:g}, another part's has "
                        f"{self.weights[name]:g}; give one of them another `name`"
                    )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for rewards in self.parts.values():
                stack.enter_context(rewards)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def open(self) -> int:
        """Completions that are being scored."""
        return sum(rewards.open for rewards in self.parts.values())

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        """Sets `completion.rewards` and `completion.reward`. Raises RewardError."""
        await self.parts[part_of(prompt)].score(prompt, completion)

    def stats(self, groups: Sequence[Group]) -> dict[str, float]:
        """Each part's statistics, of its own groups, under `reward/<part>/...`."""
        found: dict[str, float] = {}
        for part, rewards in self.parts.items():
            own = [group for group in groups if part_of(group.prompt) == part]
            found |= {f"reward/{part}/{key.removeprefix('reward/')}": v for key, v in rewards.stats(own).items()}
        return found


def part_of(prompt: Prompt) -> str:
    """The part that a prompt of a mixture is from; its rows are named `<part>/<split>/<number>`."""
    return prompt.row.partition("/")[0]
