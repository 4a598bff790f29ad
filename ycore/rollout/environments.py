"""Environments by name, in the tool worker's own process, which seeds `random` before every call; all chance is from it.

- `textarena:ID?key=value`: a game of TextArena; the keys are arguments of the game's class, but for `partial=false`.
- `gym:NAME`: a task of reasoning-gym with several tries.
- `openenv:file.py:Name` or `openenv:package.module:Name`: an `Environment` or `ResourceSessionFactory` of OpenEnv,
  without server or container. Its MCP tools are the tools; else its typed action is the tool `step`, or the policy's
  whole turn where an action is one text. The reward is the last one that was given, as in OpenEnv's own rollouts.
"""

import importlib.util
import inspect
import json
import random
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_args

from ycore.errors import DataError, nearest
from ycore.rollout import ToolRefused


class TextArena:
    """A game for one player. The observation after a move is what the game said since; a game not over pays 0.

    With `partial=false` what is less than a win (1) pays 0 too: many games pay a part after nonsense.
    """

    name: str

    def __init__(self) -> None:
        try:
            import textarena
        except ImportError:
            raise ToolRefused(
                f"textarena:{self.name} needs the package textarena: pip install 'ycore[textarena]'"
            ) from None
        self._library = textarena
        self._id, self._arguments = _split(f"textarena:{self.name}")
        self._pays_parts = self._arguments.pop("partial", True) is not False
        games = textarena.envs.registration.ENV_REGISTRY
        if self._id not in games:
            way_out = (
                nearest(self._id, games)
                or f"; there are {len(games)}, such as GuessTheNumber-v0"
            )
            raise ToolRefused(f"TextArena has no game {self._id!r}{way_out}")
        try:
            self.reset()
        except Exception as error:
            problem = " ".join(str(error).split())[:200]
            raise ToolRefused(
                f"the game {self.name!r} does not start here with one player: {type(error).__name__}: {problem}; "
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


def _split(name: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a `scheme:NAME?key=value`."""
    from ycore.data.generated import parse_name, typed_arguments

    try:
        plain_name, arguments = parse_name(name)
    except DataError as error:
        raise ToolRefused(str(error)) from None
    return plain_name, typed_arguments(arguments)


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
        try:
            (self._row,) = gym_table(name, split="train", seed=random.getrandbits(31)).rows
        except DataError as error:
            raise ToolRefused(str(error)) from None
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


OPENENV_PREFIX = "openenv:"


def openenv_local(name: str, load: Callable[[str], Any]) -> "LocalEnvironment":
    """Return the environment of `openenv:NAME`; ToolRefused where it is none that can be made here."""
    target = name.removeprefix(OPENENV_PREFIX)
    if "://" in target or ":" not in target:
        raise ToolRefused(
            f"{name!r}: OpenEnv's environments run in the sandbox here, without server, hub or container; name a "
            "class, as openenv:file.py:Name or openenv:package.module:Name"
        )
    if importlib.util.find_spec("openenv") is None:
        raise ToolRefused(
            f"{name!r} needs the package openenv, which this Python has not, and which cannot be beside vLLM; install "
            "it in a virtual environment of its own, and name that one's Python with --env-python"
        )
    from openenv.core.env_server import Environment
    from openenv.core.harness import ResourceSessionFactory

    made = load(target)
    if inspect.isclass(made) and issubclass(made, ResourceSessionFactory):
        return SessionEnvironment(name, made())
    if inspect.isclass(made) and issubclass(made, Environment):
        return SteppedEnvironment(name, made())
    raise ToolRefused(
        f"{name!r} is neither an Environment nor a ResourceSessionFactory of OpenEnv"
    )


class LocalEnvironment:
    """The base of both kinds: their tools, declared as an MCP server's are, and the last reward."""

    takes_text = False
    turn_reward: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._reward: float | None = None
        self._is_over = False

    @cached_property
    def tools(self) -> dict[str, Any]:
        """Name: description and JSON schema."""
        raise NotImplementedError

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {"name": name, "description": description, "parameters": schema},
            }
            for name, (description, schema) in self.tools.items()
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._is_over:
            raise RuntimeError("the episode is over")
        return self._call(name, dict(arguments))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        raise NotImplementedError

    def get_reward(self) -> float | None:
        return self._reward

    def _note(self, *, reward: Any, done: bool) -> None:
        self.turn_reward = None if reward is None else float(reward)
        self._reward = self._reward if reward is None else float(reward)
        self._is_over = done


class SteppedEnvironment(LocalEnvironment):
    """An `Environment`."""

    def __init__(self, name: str, env: Any) -> None:
        from openenv.core.env_server.mcp_environment import MCPEnvironment

        super().__init__(name)
        self._env = env
        self._action = None if isinstance(env, MCPEnvironment) else _action_of(type(env))
        if self._action is None and not isinstance(env, MCPEnvironment):
            raise ToolRefused(
                f"{name!r} does not say which action it takes; write Environment[Action, Observation, State]"
            )
        fields = {} if self._action is None else dict(self._action.model_fields)
        fields.pop("metadata", None)
        needed = [key for key, field in fields.items() if field.is_required()]
        self._text = (
            needed[0] if len(needed) == 1 and fields[needed[0]].annotation is str else None
        )
        self.takes_text = self._text is not None

    @cached_property
    def tools(self) -> dict[str, Any]:
        if self._action is None:
            from openenv.core.env_server.mcp_types import ListToolsAction

            return {
                tool.name: (tool.description, tool.input_schema)
                for tool in self._env.step(ListToolsAction()).tools
            }
        schema = self._action.model_json_schema()
        schema["properties"].pop("metadata", None)
        return {"step": (inspect.getdoc(self._action) or "", schema)}

    def reset(self, **row: Any) -> str:
        self._reward, self._is_over = None, False
        arguments = {"seed": random.getrandbits(31), **row}
        accepted = inspect.signature(self._env.reset).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in accepted.values()):
            arguments = {key: value for key, value in arguments.items() if key in accepted}
        return self._observed(self._env.reset(**arguments))

    def step(self, text: str) -> str | None:
        assert self._action is not None and self._text is not None
        text = self._observed(self._env.step(self._action(**{self._text: text})))
        return None if self._is_over else text

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._action is not None:
            return self._observed(self._env.step(self._action(**arguments)))
        from openenv.core.env_server.mcp_types import CallToolAction

        observation = self._env.step(CallToolAction(tool_name=name, arguments=arguments))
        if observation.error is not None:
            raise RuntimeError(observation.error.message)
        self._note(reward=observation.reward, done=observation.done)
        blocks = getattr(observation.result, "content", None)
        if blocks is None:
            return _text(observation.result)
        return "\n".join(getattr(block, "text", "") for block in blocks)

    def _observed(self, observation: Any) -> str:
        self._note(reward=observation.reward, done=observation.done)
        values = observation.model_dump(
            mode="json", exclude={"done", "reward", "metadata"}, exclude_none=True
        )
        return _text(next(iter(values.values())) if len(values) == 1 else values)


class SessionEnvironment(LocalEnvironment):
    """A session that a `ResourceSessionFactory` creates for a row; its tools must be the same for every row.

    `verify` gets the messages that it began with, and those of the tools.
    """

    def __init__(self, name: str, factory: Any) -> None:
        super().__init__(name)
        self._factory = factory
        self._session: Any = None
        self._transcript: list[dict[str, Any]] = []

    @cached_property
    def tools(self) -> dict[str, Any]:
        session = self._session or self._factory.create(task={}, seed=0)
        return {
            tool.name: (tool.description, tool.input_schema) for tool in session.list_tools()
        }

    def reset(self, **row: Any) -> str:
        if self._session is not None:
            self._session.close()
        self._reward, self._is_over = None, False
        self._session = self._factory.create(task=row, seed=random.getrandbits(31))
        self._transcript = list(self._session.initial_messages())
        return "\n".join(_text(message["content"]) for message in self._transcript)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._session is not None
        result = self._session.call_tool(name, arguments)
        if result.error is not None:
            raise RuntimeError(result.error)
        self._note(reward=result.metadata.get("reward"), done=result.done)
        self._transcript.append({"role": "tool", "name": name, "content": _text(result.data)})
        return _text(result.data)

    def get_reward(self) -> float | None:
        assert self._session is not None
        verified = self._session.verify(list(self._transcript))
        return self._reward if verified.env_reward is None else float(verified.env_reward)


def _action_of(made: type) -> Any:
    """Return the model of an environment's actions: the first parameter of its generic base class."""
    from openenv.core.env_server.types import Action

    for base in made.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for argument in get_args(generic):
                if inspect.isclass(argument) and issubclass(argument, Action):
                    return argument
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
