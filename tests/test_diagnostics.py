"""Off-policy figures by hand, by lag, and the drift alarm: which of two things it is."""

import logging
import math
from typing import Any

import pytest
import torch

from grpo.diagnostics import NAMES, diagnostics
from grpo.drift import DriftAlarm, DriftError


def measure(
    log_ratio: list[float],
    lag: list[int] | None = None,
    advantages: list[float] | None = None,
    clipped: list[bool] | None = None,
    **changes: Any,
) -> dict[str, float]:
    n = len(log_ratio)
    arrays = {
        "logprobs_N": torch.tensor(log_ratio, dtype=torch.float64) - 1.0,
        "sampler_logprobs_N": torch.full((n,), -1.0),
        "lag_N": torch.tensor(lag or [0] * n),
        "advantages_N": torch.tensor(advantages or [1.0] * n),
        "clipped_N": torch.tensor(clipped or [False] * n),
        "clamped_N": torch.tensor([abs(x) > 20 for x in log_ratio]),
        "entropy_N": torch.arange(n).float(),
    }
    return diagnostics(**(arrays | changes))


def test_figures_by_hand() -> None:
    """Ratios 1, 2, 0.5, 4."""
    log2 = math.log(2)
    got = measure([0.0, log2, -log2, 2 * log2])
    assert got["ratio/mean"] == pytest.approx(7.5 / 4)
    assert (got["ratio/min"], got["ratio/max"]) == (pytest.approx(0.5), pytest.approx(4.0))
    assert got["kl/sampler_k1"] == pytest.approx(-2 * log2 / 4)
    assert got["kl/sampler"] == pytest.approx((0 + (1 - log2) + (-0.5 + log2) + (3 - 2 * log2)) / 4)
    assert got["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert got["entropy"] == 1.5
    assert got["lag/mean"] == got["lag/max"] == 0.0


def test_the_kl_is_from_the_sampler_to_the_policy() -> None:
    """Sampler (0.8, 0.2), policy (0.5, 0.5), tokens in the sampler's proportion: k1 and k3 are exact."""
    sampled = [math.log(0.5 / 0.8)] * 8 + [math.log(0.5 / 0.2)] * 2
    exact = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    got = measure(sampled)
    assert got["kl/sampler"] == pytest.approx(exact)
    assert got["kl/sampler_k1"] == pytest.approx(exact)
    assert got["ratio/mean"] == pytest.approx(1.0)


def test_tails_count_tokens_outside() -> None:
    got = measure([math.log(r) for r in (0.4, 0.55, 0.89, 0.91, 1.0, 1.09, 1.11, 1.9, 2.1, 3.0)])
    assert got["ratio/outside_0.9_1.1"] == pytest.approx(0.7)
    assert got["ratio/outside_0.5_2"] == pytest.approx(0.3)


def test_clip_fraction_by_sign_of_the_advantage() -> None:
    got = measure([0.0] * 5, advantages=[1.0, 1.0, -1.0, -1.0, 0.0], clipped=[True, False, True, True, False])
    assert got["clip/fraction"] == pytest.approx(0.6)
    assert got["clip/fraction_positive"] == 0.5
    assert got["clip/fraction_negative"] == 1.0
    assert "clip/fraction_negative" not in measure([0.0, 0.0])


def test_every_figure_is_there_for_every_lag_that_occurs() -> None:
    log2 = math.log(2)
    got = measure(
        [0.0, log2, log2, -log2], lag=[0, 2, 2, 2], advantages=[1.0, -1.0, 1.0, 1.0], clipped=[False, True, True, False]
    )
    assert {name.split("/")[0] for name in got if name.startswith("lag_")} == {"lag_0", "lag_2"}
    assert (got["lag_0/tokens"], got["lag_2/tokens"]) == (1.0, 3.0)
    assert (got["lag_0/kl"], got["lag_0/ess"], got["lag_0/clip_fraction"]) == (0.0, 1.0, 0.0)
    assert got["lag_2/ess"] == pytest.approx(4.5**2 / (3 * 8.25))
    assert got["lag_2/clip_fraction"] == pytest.approx(2 / 3)
    assert got["lag_2/clip_fraction_positive"] == 0.5
    assert (got["lag/mean"], got["lag/max"]) == (1.5, 2.0)
    assert {f"lag_2/{name}" for name in NAMES} <= set(got)


def test_the_figures_of_the_lags_add_up_to_the_whole() -> None:
    g = torch.Generator().manual_seed(0)
    d, lag = torch.randn(50, generator=g).double(), torch.randint(0, 3, (50,), generator=g)
    got = measure(d.tolist(), lag=lag.tolist(), clipped=(d > 1).tolist())
    for name in ("kl", "kl_k1", "clip_fraction", "ratio_mean", "entropy", "ratio_outside_0.5_2"):
        parts = sum(got[f"lag_{k}/tokens"] * got[f"lag_{k}/{name}"] for k in range(3))
        assert parts / 50 == pytest.approx(got[NAMES[name]])


def test_small_differences_keep_their_digits() -> None:
    """In float32, expm1(1e-4) - 1e-4 is off by a tenth of a percent."""
    n = 1000
    got = measure([1e-4] * n)
    assert got["kl/sampler"] == pytest.approx(5.00017e-9, rel=1e-5)
    assert got["ess"] == pytest.approx(1.0, abs=1e-12)


def test_extremes_are_bounded_and_counted_and_nan_is_not_hidden() -> None:
    got = measure([200.0, 0.0, 0.0, 0.0])
    assert got["ratio/max"] == pytest.approx(math.exp(20))
    assert got["ratio/clamped_fraction"] == 0.25
    assert all(math.isfinite(value) for value in got.values())
    assert math.isnan(measure([math.nan, 0.0])["kl/sampler"])
    assert math.isnan(measure([-math.inf, 0.0])["kl/sampler"])


def test_a_batch_without_a_token_has_no_figures() -> None:
    empty = torch.zeros(0)
    names = ("logprobs_N", "sampler_logprobs_N", "lag_N", "advantages_N", "clipped_N", "clamped_N", "entropy_N")
    assert diagnostics(**dict.fromkeys(names, empty)) == {}


# The alarm


def drifted(kl_0: float | None, ess: dict[int, float], tokens: int = 1000) -> dict[str, float]:
    metrics = {
        f"lag_{k}/{name}": value
        for k, e in ess.items()
        for name, value in (("tokens", tokens), ("ess", e), ("kl", 0.3))
    }
    if kl_0 is not None:
        metrics |= {"lag_0/tokens": tokens, "lag_0/kl": kl_0, "lag_0/ess": 0.9}
    return metrics


def test_the_alarm_tells_the_engine_from_policy_lag(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="grpo.drift"):
        assert DriftAlarm().check(drifted(1e-6, {1: 0.9, 4: 0.6})) is None
        assert caplog.messages == []
        assert DriftAlarm().check(drifted(0.02, {1: 0.3})) == "engine"  # the engine's fault shows at every lag
        assert DriftAlarm().check(drifted(1e-6, {1: 0.9, 4: 0.3})) == "lag"
        assert DriftAlarm().check(drifted(None, {1: 0.3})) == "lag"
    engine, lag, unknown = caplog.messages
    assert "engine disagrees" in engine
    assert "0.02 nats" in engine
    assert "sync.verify_every=1" in engine
    assert "policy lag. At lag 4 the effective sample size is 0.3" in lag
    assert "KL at lag 0 is 1e-06, in order" in lag
    assert "rollout.max_staleness" in lag
    assert "engine is not excluded" in unknown


def test_stop_raises() -> None:
    with pytest.raises(DriftError, match=r"engine disagrees .*loss.on_drift=stop"):
        DriftAlarm(action="stop").check(drifted(0.02, {}))
    assert DriftAlarm(action="stop").check(drifted(1e-6, {1: 0.9})) is None


def test_a_nan_is_an_alarm() -> None:
    assert DriftAlarm().check(drifted(math.nan, {})) == "engine"
    assert DriftAlarm().check(drifted(None, {1: math.nan})) == "lag"


def test_a_low_sample_size_at_lag_0_is_never_called_policy_lag() -> None:
    assert DriftAlarm().check({"lag_0/tokens": 1000, "lag_0/kl": 0.004, "lag_0/ess": 0.1}) is None


def test_few_tokens_are_not_judged() -> None:
    assert DriftAlarm().check(drifted(0.5, {1: 0.1}, tokens=99)) is None
    assert DriftAlarm().check({}) is None


def test_a_lasting_alarm_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DriftAlarm()
    with caplog.at_level(logging.WARNING, logger="grpo.drift"):
        for ess in (0.3, 0.3, 0.9, 0.3):
            alarm.check(drifted(None, {1: ess}))
    assert len(caplog.messages) == 2


def test_the_alarm_reads_what_the_diagnostics_write() -> None:
    """Log-ratios with a standard deviation of 0.3 at lag 0, of 0.9 at lag 2, of 3e-4 at lags 0 and 1."""
    g = torch.Generator().manual_seed(0)
    noise = (torch.randn(500, generator=g) * 0.3).tolist()
    assert DriftAlarm().check(measure(noise, lag=[0] * 500)) == "engine"
    assert DriftAlarm().check(measure([3 * x for x in noise], lag=[2] * 500)) == "lag"
    assert DriftAlarm().check(measure([1e-3 * x for x in noise], lag=[0] * 250 + [1] * 250)) is None
