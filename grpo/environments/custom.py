"""The user's own class as an environment: `data.environment=my_game.py:Game` or `package.module:Game`.

    class Game:
        def __init__(self, size=3): ...                       # other keys of data.environment
        def reset(self, row): ...                             # -> messages, text, or None for the row's own prompt
        def step(self, completion): ...                       # -> (observation, reward, done)

`async def` works too. It runs in the run's own process, each call of a plain method in a thread of its own.
"""

from dataclasses import dataclass, field
from typing import Any

from grpo.environments.base import KEY, Environment, Kind
from grpo.environments.source import check_defined
from grpo.rewards.python import import_function


@dataclass(kw_only=True)
class Custom(Kind):
    """path: file.py:Class or module:Class. arguments: of its constructor."""

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    _class: Any = field(default=None, init=False)

    def check(self) -> None:
        check_defined(self.path, KEY, self.arguments)

    def make(self) -> Environment:
        if self._class is None:
            self._class = import_function(self.path)
        made: Environment = self._class(**self.arguments)
        return made
