"""A data set as the configuration describes it, and what loading it gives.

    data = Jsonl(path="my.jsonl", reward="math_verify", max_prompt_tokens=512, max_tokens=1024)
    data.check()                          # what can be seen without a tokenizer; no model, seconds at most
    loaded = data.load(tokenizer, seed)   # every row looked at; ValueError when something is wrong with the set
    with data.rewards() as rewards: ...   # what scores its completions

Subclasses say where the rows come from (`find`, `tables`); everything else is the same for all.
"""

import copy
import logging
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grpo.data.render import Renderer
from grpo.data.rows import Reader, Table
from grpo.data.screen import Screened, choose, hold_out, screen, split
from grpo.data.stream import PromptMaker, Stream
from grpo.environments.build import build_environment
from grpo.rewards import Rewards, build_rewards
from grpo.rewards.base import ANSWER
from grpo.rewards.options import at_least, check_types, one_of
from grpo.types import Prompt, PromptSource

if TYPE_CHECKING:
    from grpo.environments.hosted import Hosted

log = logging.getLogger(__name__)

SAMPLE = 64  # rows of a generated table that are looked at
# In these a held-out set is as its training set: it is played and scored in the same way.
SHARED = {"reward", "environment", "max_prompt_tokens", "max_tokens", "epochs", "evals", "streaming"}


@dataclass(slots=True)
class LoadedData:
    """train: the prompt stream. evals: held-out prompts by the set's name. report: what was read and left out.
    held_out: keys of prompts that are in a held-out set."""

    train: PromptSource
    evals: dict[str, list[Prompt]]
    report: dict[str, Any]
    held_out: frozenset[bytes] = frozenset()


@dataclass(kw_only=True)
class Data:
    """The keys that every data set has; conf/data/ explains them to users.

    prompt: format string over columns. answer: column of the gold; null when the reward needs none. eval_rows: rows of
    each held-out set; without `evals`, so many are taken out of the training rows. duplicates: "drop" or "keep".
    environment: what answers the policy between its turns (grpo.environments); null: a completion is one turn.
    """

    GENERATED: ClassVar[bool] = False  # rows made by our own code: a sample is looked at, not every row

    reward: Any
    max_prompt_tokens: int
    max_tokens: int
    prompt: str = "{prompt}"
    answer: str | None = "answer"
    answer_pattern: str | None = None
    template: str = "auto"
    system: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    eval_rows: int = 256
    epochs: int | None = None
    duplicates: str = "drop"
    environment: Any = None

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least(1, "data", max_prompt_tokens=self.max_prompt_tokens, max_tokens=self.max_tokens, epochs=self.epochs)
        at_least(0, "data", eval_rows=self.eval_rows)
        one_of(("auto", "chat", "plain"), "data", template=self.template)
        one_of(("drop", "keep"), "data", duplicates=self.duplicates)
        if self.template == "plain" and self.chat_template_kwargs:
            raise ValueError("data.chat_template_kwargs: a plain prompt has no chat template; use data.template=chat")
        self.kind = build_environment(self.environment)
        self.reader = Reader(self.prompt, self.answer, self.answer_pattern)
        if self.rewards().needs_answer and self.answer is None:
            raise ValueError(f"data.answer=null: the reward compares with an answer (data.reward={self.reward})")
        if self.kind is None and any(reward.KIND == "environment" for reward in self.rewards().rewards):
            raise ValueError("data.reward=environment: there is none; set data.environment")

    def variant(self, name: str, keys: Any) -> Self:
        """The held-out set `name`: this one, but for `keys`. Raises ValueError."""
        key = f"data.evals.{name}"
        if not isinstance(keys, Mapping):
            raise ValueError(
                f"{key}={keys!r}: expected the keys in which it differs, e.g. {{path: ...}} (~{key} leaves it out)"
            )
        own = {f.name for f in fields(self)} - SHARED
        for unknown in keys.keys() - own:
            raise ValueError(f"{key}.{unknown}: no such key; a held-out set may differ in {', '.join(sorted(own))}")
        try:
            return replace(self, **{"evals": {}, **keys})
        except ValueError as error:
            raise ValueError(str(error).replace("data.", f"{key}.", 1)) from None

    def check_columns(self, columns: Sequence[str], where: str) -> None:
        """Raises ValueError when the prompt, the reward or the environment asks for a column that is not there."""
        self.reader.check_columns(columns, where)
        self.rewards().check_columns({*columns, ANSWER} if self.answer else columns)
        if self.kind is not None:
            self.kind.check_columns(columns)

    # ---- what subclasses say ----

    @abstractmethod
    def find(self) -> None:
        """Raises ValueError when the rows are not where they should be, or lack columns. Cheap."""

    def at_hand(self) -> bool:
        """Whether its rows can be read without a download."""
        return True

    @abstractmethod
    def tables(self) -> tuple[Table, dict[str, tuple["Data", Table]]]:
        """Training rows, and held-out rows by name with the description that reads them."""

    # ---- what run.py calls ----

    def check(self) -> None:
        """Raises ValueError for what can be seen before anything is loaded."""
        self.rewards().check()
        if self.kind is not None:
            self.kind.check()
        self.find()

    def rewards(self) -> Rewards:
        """The rewards of this data set, not yet started."""
        return Rewards(build_rewards(copy.deepcopy(self.reward), max_tokens=self.max_tokens))

    def environments(self, tokenizer: Any, stop_ids: Collection[int]) -> "Hosted | None":
        """What answers the policy between its turns, not yet started; None where completions have one turn.

        stop_ids: the tokens that end an answer. Raises ValueError.
        """
        if self.kind is None:
            return None
        from grpo.environments.borders import Borders
        from grpo.environments.hosted import Hosted

        borders = Borders(self._renderer(tokenizer), stop_ids)
        self.kind.check_template(borders)
        return Hosted(self.kind, borders, max_prompt_tokens=self.max_prompt_tokens)

    def load(self, tokenizer: Any, seed: int) -> LoadedData:
        """Reads and checks the data. Raises ValueError; a reward that cannot be loaded is a RewardError."""
        started = time.monotonic()
        train, held_out = self.tables()
        with self.rewards() as rewards:
            rewards.wait_ready()
            if self.GENERATED:
                loaded = self._sample(train, held_out, tokenizer, seed)
            else:
                loaded = self._screen(train, held_out, tokenizer, rewards, seed)
        loaded.report["seconds"] = round(time.monotonic() - started, 3)
        return loaded

    # ---- how ----

    def _maker(self, table: Table, tokenizer: Any) -> PromptMaker:
        self.check_columns(table.columns, f"the data ({table.name})")
        return PromptMaker(table, self.reader, self._renderer(tokenizer), self.max_prompt_tokens)

    def _renderer(self, tokenizer: Any) -> Renderer:
        arguments = {**(self.kind.template_arguments() if self.kind else {}), **self.chat_template_kwargs}
        return Renderer(tokenizer, template=self.template, system=self.system, chat_template_kwargs=arguments)

    def _screened(self, maker: PromptMaker, rewards: Rewards, held_out: set[bytes]) -> Screened:
        return screen(
            maker.table,
            self.reader,
            maker.renderer,
            rewards,
            max_prompt_tokens=self.max_prompt_tokens,
            drop_duplicates=self.duplicates == "drop",
            held_out=held_out,
        )

    def _screen(
        self,
        train: Table,
        held_out: dict[str, tuple["Data", Table]],
        tokenizer: Any,
        rewards: Rewards,
        seed: int,
    ) -> LoadedData:
        """Every row is read; a prompt of a held-out set is never trained on."""
        report: dict[str, Any] = {}
        evals: dict[str, list[Prompt]] = {}
        reserved: set[bytes] = set()
        for name, (data, table) in held_out.items():
            maker = data._maker(table, tokenizer)
            screened = data._screened(maker, rewards, set())
            reserved |= set(screened.keys)
            chosen = choose(screened, data.eval_rows)
            report[name] = screened.report | {"used": len(chosen)}
            if chosen:
                evals[name] = _eval_prompts(maker, chosen, evals)
        maker = self._maker(train, tokenizer)
        screened = self._screened(maker, rewards, reserved)
        if not held_out and self.eval_rows:
            reserved = hold_out(screened, self.eval_rows)
            screened, chosen = split(screened, reserved)
            report["held_out"] = {"used": len(chosen), "wanted": self.eval_rows, "of": train.name}
            if chosen:
                evals["held_out"] = _eval_prompts(maker, chosen, evals)
            if len(chosen) < self.eval_rows:
                log.warning(
                    "%d rows are held out for evaluation, not data.eval_rows=%d: at most a fifth of the %d usable rows",
                    len(chosen), self.eval_rows, len(screened.kept) + len(chosen),
                )  # fmt: skip
        report["train"] = screened.report | {"used": len(screened.kept), "fingerprint": fingerprint(screened.keys)}
        stream = Stream(maker, screened.kept, seed, self.epochs, screened.keys)
        return LoadedData(stream, evals, report, frozenset(reserved))

    def _sample(self, train: Table, held_out: dict[str, tuple["Data", Table]], tokenizer: Any, seed: int) -> LoadedData:
        """Rows that our own code makes are right by construction, and too many to read: a sample shows the template."""
        evals: dict[str, list[Prompt]] = {}
        for name, (data, table) in held_out.items():
            evals[name] = _eval_prompts(data._maker(table, tokenizer), range(len(table.rows)), evals)
        maker = self._maker(train, tokenizer)
        stream = Stream(maker, range(len(train.rows)), seed, self.epochs)
        sample = [p for i in range(min(SAMPLE, len(train.rows))) if (p := stream.prompt(i)) is not None]
        unknown = tokenizer.unk_token_id
        report: dict[str, Any] = {name: {"used": len(prompts)} for name, prompts in evals.items()}
        report["train"] = {
            "rows": len(train.rows),
            "used": len(train.rows),
            "sampled": len(sample),
            "prompt_tokens_max": max(len(p.token_ids) for p in sample),
            "with_unknown_tokens": sum(unknown is not None and unknown in p.token_ids for p in sample),
            "fingerprint": fingerprint(p.text.encode() for p in sample),
        }
        return LoadedData(stream, evals, report)


def fingerprint(keys: Iterable[bytes]) -> str:
    """Equal for equal rows in equal order: tells whether a resumed run has the data that it began with."""
    digest = blake2b(digest_size=8)
    for key in keys:
        digest.update(len(key).to_bytes(4, "big") + key)
    return digest.hexdigest()


def _eval_prompts(maker: PromptMaker, rows: Sequence[int], before: dict[str, list[Prompt]]) -> list[Prompt]:
    """Held-out prompts have negative places: they are in no stream, and no two of a run share one."""
    taken = sum(map(len, before.values()))
    return [maker.make(-1 - taken - place, i) for place, i in enumerate(rows)]
