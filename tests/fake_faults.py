"""What a test can make the fake server do wrong: one `Fault`, and the ways to spoil a generate answer (`edit=`).

    server.add_fault(Fault("generate", status=500, times=1))                       # one 500, then all is well
    server.add_fault(Fault("generate", edit=null("logprobs"), when=lambda call: call.body["token_ids"][0] == 7))
    server.add_fault(Fault("update_weights", apply="all_but_head"))                # answers 200, keeps the old head
    server.add_fault(Fault("finish_weight_update", late=True, drop=True))          # done, but nobody is told

A fault names the call it belongs to (`Call.name`, "*" for every call), and is spent after `times` matching calls
(None: never). The first fault that matches a call is the one that counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fake_engine import Running

Answer = dict[str, Any]
Edit = Callable[[Answer], None]


@dataclass(eq=False)
class Call:
    """One request that the server received. `time` is monotonic; `status` stays None where no answer was sent.

    Each sequence (one per completion, `n` in all) may compute `allowed` tokens: the gate that a test holds and steps.
    """

    name: str
    order: int
    time: float
    query: dict[str, str]
    body: dict[str, Any]
    headers: Mapping[str, str]
    allowed: float
    status: int | None = None
    open: bool = True
    sequences: list[Running] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens generated so far, of all its sequences together."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(eq=False)
class Fault:
    """One thing that goes wrong. Several may be set; they happen in the order of the fields.

    delay: seconds before anything is done. hang: never go on (until the fault is removed). die: the server is gone
    (a process exits). drop: the socket is closed without an answer. status: this status, with an error as body.
    `late` lets the work be done before hang, die, drop and status. apply: do "nothing", or load "all_but_head", and
    answer 200. edit: change the answer. raw: send these bytes instead of it. cut: close the socket after this share
    of the answer's bytes.
    """

    call: str
    when: Callable[[Call], bool] = lambda call: True
    times: int | None = None
    after: int = 0  # this many matching calls go well first
    delay: float = 0.0
    hang: bool = False
    die: bool = False
    drop: bool = False
    status: int | None = None
    late: bool = False
    apply: Literal["everything", "nothing", "all_but_head"] = "everything"
    edit: Edit | None = None
    raw: bytes | None = None
    cut: float | None = None
    hits: int = 0  # how often it happened

    def take(self, call: Call) -> bool:
        """Whether it happens to this call; counts."""
        if self.call not in ("*", call.name) or self.times == 0 or not self.when(call):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True


# Edits. Each changes the first choice of a generate answer.


def null(name: str) -> Edit:
    """`token_ids`, `logprobs`, `weight_versions` or `finish_reason` is null."""
    return lambda answer: answer["choices"][0].update({name: None})


def missing(name: str) -> Edit:
    """The field is not there at all."""
    return lambda answer: answer["choices"][0].pop(name)


def short(name: str, by: int = 1) -> Edit:
    """`token_ids` or `logprobs` lacks its last entries, or the spans of `weight_versions` end `by` tokens early."""

    def edit(answer: Answer) -> None:
        choice = answer["choices"][0]
        if name == "weight_versions":
            choice[name][-1]["end"] -= by
        elif name == "logprobs":
            del choice[name]["content"][-by:]
        else:
            del choice[name][-by:]

    return edit


def logprob(value: float | None, at: int = -1) -> Edit:
    """One token's logprob is `value`: None, nan, -inf, -9999.0 (what vLLM sends for those two), 0.5, ..."""

    def edit(answer: Answer) -> None:
        answer["choices"][0]["logprobs"]["content"][at]["logprob"] = value

    return edit


def chosen(token_ids: list[int], logprobs: list[float] | None = None, finish_reason: str = "stop") -> Edit:
    """The sampler "chose" these ids, with these logprobs (-1 each if not given), under the last version."""
    values = logprobs if logprobs is not None else [-1.0] * len(token_ids)

    def edit(answer: Answer) -> None:
        choice = answer["choices"][0]
        version = choice["weight_versions"][-1]["version"]
        content = [
            {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []} for i, p in zip(token_ids, values, strict=True)
        ]
        choice.update(
            token_ids=token_ids,
            logprobs={"content": content},
            finish_reason=finish_reason,
            stop_reason=None,
            weight_versions=[{"version": version, "start": 0, "end": len(token_ids)}],
        )

    return edit


def version(label: str) -> Edit:
    """Every span carries this label."""

    def edit(answer: Answer) -> None:
        for span in answer["choices"][0]["weight_versions"]:
            span["version"] = label

    return edit


def finish(reason: str) -> Edit:
    """The finish reason is `reason` ("abort", "error", "length", ...), the tokens stay."""
    return lambda answer: answer["choices"][0].update(finish_reason=reason)


def huge(megabytes: int) -> Edit:
    """The answer is this much larger, in a field that nobody asked for."""
    return lambda answer: answer.update(kv_transfer_params={"padding": "x" * (megabytes * 2**20)})
