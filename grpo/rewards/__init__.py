"""Verifiable rewards: text in, a number out, isolated from the run and timed. docs/rewards.md shows how to write one.

combined.py scores a completion with all rewards of a data set; build.py reads `data.reward`; text.py and the modules
named after their kind are the rewards; isolated.py, pool.py, process.py and worker.py keep a user's code in processes
of its own; audit.py compares a verifier with a strict comparison.
"""

from grpo.rewards.base import RewardError
from grpo.rewards.build import build_rewards
from grpo.rewards.combined import Rewards

__all__ = ["RewardError", "Rewards", "build_rewards"]
