"""Environments: what answers the policy between the turns of a completion. docs/environments.md is for users.

base.py      the Protocol, and what every kind has (limits, deadline)      build.py   from `data.environment` to one
hosted.py    runs them for the loader: deadlines, threads, rewards         borders.py observations as token ids
guess.py     a game that ships with the tiny model                         tools.py   tool calls of chat models
custom.py    the user's own class
"""
