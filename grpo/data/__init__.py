"""Data sets: a seeded, resumable prompt stream, held-out prompts, and a count of every row that was left out.

base.py is the frame (start there). Where rows come from: builtin.py, files.py, hub.py, gym.py. The steps from a row to
a place in the stream: rows.py, render.py, screen.py, order.py, stream.py. mixture.py mixes sets.
docs/data.md is for users.
"""

from grpo.data.base import Data, LoadedData
from grpo.data.builtin import Arithmetic, Guessing
from grpo.data.files import Jsonl
from grpo.data.gym import ReasoningGym
from grpo.data.hub import Hub
from grpo.data.mixture import Mixture

__all__ = ["Arithmetic", "Data", "Guessing", "Hub", "Jsonl", "LoadedData", "Mixture", "ReasoningGym"]
