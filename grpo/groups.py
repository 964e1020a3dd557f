"""What is decided about a group once all its completions are scored: whether it is trained, and on what terms.

In the loader's loop, as a group completes: `GroupRules.judge` says whether it leaves the stream. In the trainer, when
a batch is made of groups: `settle_outcomes` gives each completion its advantage and its outcome.
"""

from collections import Counter
from dataclasses import dataclass, field

from grpo.advantages import advantages, is_equal
from grpo.losses.base import Loss
from grpo.rollout.loader import StreamEnded
from grpo.types import IN_FLIGHT, TRAINED, Completion, Group


class NothingToLearn(StreamEnded):
    """Group after group had equal rewards or was left out; an error for all kinds but one, all_right.

    `kind` is the most frequent one: all_right, all_wrong, other, unscored, or why they left the stream (refused, ...).
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class GroupRules:
    """Judges groups one after the other, in the order in which they complete. Called from the loader's loop only.

    zero_variance: "discard" takes groups of equal rewards out of the stream (their advantages are all 0, as in DAPO's
    dynamic sampling); "keep" trains them. limit: so many groups in a row that are equal, or have left the stream for
    whatever reason, end the run: there is nothing to learn, and filling up a batch would go on for ever.
    """

    loss: Loss
    zero_variance: str
    limit: int
    in_a_row: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.zero_variance not in ("discard", "keep"):
            raise ValueError(f"rollout.zero_variance={self.zero_variance!r}: choose discard or keep")

    def judge(self, group: Group) -> str | None:
        """Why the group is discarded, or None. Adds the loss's length penalty to the rewards first."""
        if group.discarded is not None:
            self._count(group.discarded)
            return group.discarded
        for completion in group.completions:
            penalty = self.loss.length_penalty(completion.tokens)
            if penalty and completion.reward is not None:
                completion.rewards["overlong"] = penalty
                completion.reward += penalty
        components = [c.rewards for c in group.completions] if self.loss.advantage == "gdpo" else None
        equal = is_equal([c.reward for c in group.completions], components)
        if equal is None:
            self.in_a_row.clear()
            return None
        self._count(equal)
        if equal == "unscored":
            return "unscored"
        return f"zero_variance:{equal}" if self.zero_variance == "discard" else None

    def _count(self, kind: str) -> None:
        self.in_a_row[kind] += 1
        if self.in_a_row.total() >= self.limit:
            kinds = [name for name, _ in self.in_a_row.most_common()]
            hints = [HINTS.get(name, "rollouts.jsonl and the run's log say why they were left out.") for name in kinds]
            if len(kinds) > 1:  # what holds of some is not said of all
                hints = [
                    f"{self.in_a_row[name]} {name}: {PARTLY_RIGHT if name == 'all_right' else hint}"
                    for name, hint in zip(kinds, hints, strict=True)
                ]
            raise NothingToLearn(
                f"{self.in_a_row.total()} groups in a row had equal rewards or were left out ({dict(self.in_a_row)}): "
                f"there is nothing to learn from. {' '.join(hints)}",
                kinds[0],
            )


PARTLY_RIGHT = "as far as they tell, the task is solved; what the others hold was not learned."
HINTS = {
    "all_right": "Every completion is right: the task is solved.",
    "all_wrong": "No completion is right: look at rollouts.jsonl, whether the reward can read the completions "
    "(data.reward, data.max_tokens), or take easier data.",
    "other": "Every completion has the same reward: look at data.reward and rollout.temperature.",
    "refused": "The server refuses the requests: the run's log has its reason.",
    "unscored": "The rewards score nothing: look at data.reward and the run's log.",
}


def settle_outcomes(groups: list[Group], loss: Loss, weights: dict[str, float]) -> dict[int, str]:
    """Set `advantage` of the completions of the kept groups; the outcome that each completion (by id()) will have.

    weights: of the rewards by name, for gdpo. The outcome is booked only after the optimizer step has been made.
    """
    kept = [g for g in groups if g.discarded is None]
    values = advantages(
        loss.advantage,
        [[c.reward for c in g.completions] for g in kept],
        [[c.rewards for c in g.completions] for g in kept],
        weights,
    )
    for group, row in zip(kept, values, strict=True):
        for completion, advantage in zip(group.completions, row, strict=True):
            completion.advantage = advantage
    return {
        id(c): f"discarded:{g.discarded}" if g.discarded is not None else _outcome(c, loss)
        for g in groups
        for c in g.completions
    }


def _outcome(completion: Completion, loss: Loss) -> str:
    assert completion.outcome == IN_FLIGHT, f"a completion that is {completion.outcome} came again"
    if completion.advantage is None:
        return "masked:unscored"
    if loss.mask_truncated and completion.truncated:
        return "masked:truncated"
    return TRAINED


def group_metrics(groups: list[Group]) -> dict[str, float]:
    """Metrics of the groups that a step consumed, discarded ones included: leaving those out would bias the reward."""
    completions = [c for g in groups for c in g.completions]
    scored = [c.reward for c in completions if c.reward is not None]
    metrics: dict[str, float] = {
        "groups/consumed": len(groups),
        "groups/trained": sum(g.discarded is None for g in groups),
    }
    if scored:
        mean = sum(scored) / len(scored)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = (sum((r - mean) ** 2 for r in scored) / len(scored)) ** 0.5
    for name in sorted({name for c in completions for name in c.rewards}):
        values = [v for c in completions if (v := c.rewards.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = sum(values) / len(values)
    if completions:
        lengths = [c.tokens for c in completions]
        metrics["completion/length_mean"] = sum(lengths) / len(lengths)
        metrics["completion/length_max"] = max(lengths)
        metrics["completion/truncated_fraction"] = sum(c.truncated for c in completions) / len(completions)
        if any(c.turns for c in completions):
            turns = [sum(turn.by_policy for turn in c.turns) or 1 for c in completions]
            metrics["turns/mean"] = sum(turns) / len(turns)
            metrics["turns/max"] = max(turns)
            observed = sum(len(c.token_ids) - c.tokens for c in completions)
            metrics["turns/observation_tokens_mean"] = observed / len(completions)
    judged = [g for g in groups if g.discarded is None or g.discarded.startswith("zero_variance")]
    equal = Counter(kind for g in judged if (kind := is_equal([c.reward for c in g.completions])) is not None)
    metrics["groups/zero_variance"] = equal.total()
    metrics |= {f"groups/{kind}": equal[kind] for kind in ("all_right", "all_wrong")}
    metrics["groups/left_out"] = len(groups) - len(judged)
    return metrics
