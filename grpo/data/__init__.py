"""Data sets: a seeded, resumable prompt stream, held-out prompts, and a count of every row that was left out.

base.py is the frame (start there); builtin.py, files.py and hub.py are where rows come from; rows.py, render.py,
screen.py, order.py and stream.py are the steps from a row to a place in the stream. docs/data.md is for users.
"""

from grpo.data.base import Data, LoadedData
from grpo.data.builtin import Arithmetic
from grpo.data.files import Jsonl
from grpo.data.hub import Hub

__all__ = ["Arithmetic", "Data", "Hub", "Jsonl", "LoadedData"]
