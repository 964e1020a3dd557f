"""The drift alarm: says when sampled data is too far from the policy, and whether the engine or policy lag is to blame.

It reads the figures of `grpo.diagnostics` for one optimizer batch. Left out: what the trainer does about it (it calls
`check`, writes the step's line, and only then stops), and trends over steps (the report shows them).
"""

import logging
import re
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class DriftError(RuntimeError):
    """`loss.on_drift=stop` and the data drifted. The message says which kind, with figures, and what to change.

    `kind` is "engine" or "lag".
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class DriftAlarm:
    """Says when the data is too far from the policy, and which of two things it is.

    - engine: KL at lag 0 above `max_kl` (nats per token). Sampler and trainer hold the same weights there, so policy
      lag cannot be the reason.
    - lag: ESS under `min_ess` at some lag above 0, while lag 0 is in order (or did not occur).

    `action` "warn" logs a warning when an alarm begins, and again only after it has ended; "stop" raises DriftError. A
    lag with fewer than `min_tokens` tokens is not judged: one token of ten with ratio 20 has an ESS of 0.2.

    The default `max_kl` of 0.005 is five times the largest floor measured between bf16 engines (mean |d| of 0.03 nats,
    KL 0.001); float32 has 1e-12.
    """

    max_kl: float = 0.005
    min_ess: float = 0.5
    action: str = "warn"
    min_tokens: int = 100
    _active: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.action not in ("warn", "stop"):
            raise ValueError(f"loss.on_drift={self.action!r}: choose warn or stop")
        if not self.max_kl > 0:
            raise ValueError(f"loss.drift_kl={self.max_kl}: nats per token, above 0 (.inf turns it off)")
        if not 0 <= self.min_ess <= 1:
            raise ValueError(f"loss.drift_ess={self.min_ess}: a share of the tokens, 0 (off) to 1")

    def check(self, metrics: dict[str, float]) -> str | None:
        """Look at one batch's `diagnostics`. Returns "engine", "lag" or None, for the metrics line; logs or raises."""
        kind, message = self._judge(metrics)
        if kind is not None:
            if self.action == "stop":
                raise DriftError(f"{message} (loss.on_drift=stop)", kind)
            if kind != self._active:
                log.warning("%s", message)
        self._active = kind
        return kind

    def _judge(self, metrics: dict[str, float]) -> tuple[str | None, str]:
        found = (re.fullmatch(r"lag_(\d+)/tokens", name) for name in metrics)
        lags = sorted(int(m[1]) for m in found if m and metrics[m[0]] >= self.min_tokens)
        kl_0 = metrics["lag_0/kl"] if 0 in lags else None
        # "not <=", so that a NaN is an alarm
        if kl_0 is not None and not kl_0 <= self.max_kl:
            return "engine", (
                "drift: the engine disagrees with the trainer. At lag 0, with equal weights, KL(sampler || trainer) is "
                f"{kl_0:.3g} nats per token (loss.drift_kl={self.max_kl:g}); policy lag cannot be the reason. Look at "
                "the last sync (sync.verify_every=1), at model.dtype against the server's, at the server's sampling "
                "defaults and at the temperature; if this is the floor of this engine, raise loss.drift_kl and correct "
                "for it with loss=tis or loss=icepop"
            )
        for k in lags:
            ess = metrics[f"lag_{k}/ess"]
            if k > 0 and not ess >= self.min_ess:
                floor = (
                    f"lag 0 has under {self.min_tokens} tokens, so the engine is not excluded"
                    if kl_0 is None
                    else f"KL at lag 0 is {kl_0:.3g}, in order"
                )
                return "lag", (
                    f"drift: policy lag. At lag {k} the effective sample size is {ess:.3g} of the tokens "
                    f"(loss.drift_ess={self.min_ess:g}); {floor}. Lower rollout.max_staleness, model.lr or "
                    "train.minibatches, or bound the weights: loss=tis, icepop, decoupled_ppo or cispo"
                )
        return None, ""
