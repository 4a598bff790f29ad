"""Environments by name, in the tool worker's own process, which seeds `random` before every call; all chance is from it.

- `textarena:ID?key=value`: a game of TextArena; the keys are arguments of the game's class, but for `partial=false`.
- `gym:NAME`: a task of reasoning-gym with several tries.
"""

import random
from collections.abc import Mapping
from typing import Any

from ycore.errors import ConfigError, nearest
from ycore.sandbox.channel import exception_line


class TextArena:
    """A game for one player. The observation after a move is what the game said since; a game not over pays 0.

    With `partial=false` what is less than a win (1) pays 0 too: many games pay a part after nonsense.
    """

    name: str

    def __init__(self) -> None:
        try:
            import textarena
        except ImportError:
            raise ConfigError(
                f"textarena:{self.name} needs the package textarena: pip install 'ycore[textarena]'"
            ) from None
        from ycore.data.generated import parse_name, typed_arguments

        self._library = textarena
        self._id, texts = parse_name(f"textarena:{self.name}")
        self._arguments = typed_arguments(texts)
        self._pays_parts = self._arguments.pop("partial", True) is not False
        games = textarena.envs.registration.ENV_REGISTRY
        if self._id not in games:
            way_out = (
                nearest(self._id, games)
                or f"; there are {len(games)}, such as GuessTheNumber-v0"
            )
            raise ConfigError(f"TextArena has no game {self._id!r}{way_out}")
        try:
            self.reset()
        except Exception as error:  # whatever a game of textarena's raises
            raise ConfigError(
                f"the game {self.name!r} does not start here with one player: {exception_line(error)}; "
                "take another: some need more players, or texts or models from the network"
            ) from error

    def reset(self, **row: Any) -> str:
        # A new game, because its wrappers keep what the last one said.
        self._game = self._library.make(self._id, **self._arguments)
        self._raw = self._game
        while isinstance(self._raw, self._library.Wrapper):
            self._raw = self._raw.env
        self._reward: Any = 0.0
        self._game.reset(num_players=1, seed=random.getrandbits(31))
        return f"Play this game. Answer with your move alone.\n{self._observation()}"

    def step(self, text: str) -> str | None:
        is_over, _ = self._game.step(text)
        if not is_over:
            return self._observation()
        rewards, _ = self._game.close()
        self._reward = None if rewards is None else rewards[0]
        if not self._pays_parts and self._reward != 1:
            self._reward = 0.0
        return None

    def get_reward(self) -> Any:
        return self._reward

    def _observation(self) -> str:
        """Return what is new: the wrappers would say all of it again each time, with the player's own moves."""
        _, messages = self._raw.get_observation()
        move = self._library.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not move)


class Gym:
    """A task of reasoning-gym that may be tried again. The question is that of the row, where it has one.

    The score is that of the last try, from reasoning-gym's own scorer.
    """

    name: str

    def __init__(self) -> None:
        self.reset()

    def reset(self, **row: Any) -> str | None:
        from ycore.data.generated import gym_table

        self._score: float | None = 0.0
        self._row: Mapping[str, Any] = row
        if "gym_entry" in row:
            return None  # the row's prompt is its question
        name = f"gym:{self.name}{'&' if '?' in self.name else '?'}size=1"
        (self._row,) = gym_table(name, split="train", seed=random.getrandbits(31)).rows
        return str(self._row["prompt"])

    def step(self, text: str) -> str | None:
        from ycore.rewards.builtin import gym

        (self._score,) = gym([""], [text], [self._row["gym_task"]], [self._row["gym_entry"]])
        return (
            None if self._score is None or self._score >= 1 else "That is not right. Try again."
        )

    def get_reward(self) -> float | None:
        return self._score


GAMES: dict[str, type] = {"textarena": TextArena, "gym": Gym}


def game_class(name: str) -> type:
    """Return the class of the environment `scheme:NAME`, a scheme of `GAMES`."""
    scheme, _, rest = name.partition(":")
    return type(GAMES[scheme].__name__, (GAMES[scheme],), {"name": rest})
