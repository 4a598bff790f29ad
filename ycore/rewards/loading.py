"""From a reward's name to its function, with its arguments bound and checked.

Not here: the built-in functions (`builtin`), importing a person's file (`importing`), and calling (`worker`).
"""

import functools
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ycore.config.run import RewardConfig
from ycore.errors import RewardError, nearest
from ycore.rewards.builtin import BUILTIN, LIBRARIES, Reward
from ycore.rewards.descendants import kill_group_and_below
from ycore.rewards.environment import reward_environment
from ycore.rewards.importing import import_function
from ycore.rewards.inputs import SUPPLIED, Inputs, inputs_of, require_columns
from ycore.rewards.reference import REFERENCE, check_reference, is_reference

CHECK_DEADLINE_S = 8.0

_FORMS = "a reward is a built-in name, file.py:function or package.module:function"


def load_reward(spec: RewardConfig) -> Reward:
    """The function of a reward, its `args` bound; RewardError where there is none, or an argument does not fit."""
    if ":" in spec.reward:
        return _bound_custom(spec, import_function(spec.reward))
    return _bound_builtin(spec)


def check_reward(spec: RewardConfig, columns: Iterable[str], *, deadline_s: float = CHECK_DEADLINE_S) -> None:
    """Refuse what could not score this dataset, before the run. A person's code is imported in a process of its own."""
    if is_reference(spec):
        check_reference(spec, columns)
    elif ":" in spec.reward:
        _check_apart(spec, sorted(columns), deadline_s)
    else:
        check_here(spec, columns)


def check_here(spec: RewardConfig, columns: Iterable[str]) -> None:
    """`check_reward` in this process: it runs what the reward's module runs when it is imported."""
    require_columns(inputs_of(load_reward(spec)), columns, reward=spec.reward)


def reward_names(specs: Sequence[RewardConfig]) -> list[str]:
    """A short name for each source, each only once: the last part of its name, numbered where it comes again."""
    names: list[str] = []
    for spec in specs:
        name = spec.reward.rpartition(":")[2].rstrip("/").rpartition("/")[2]
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _bound_builtin(spec: RewardConfig) -> Reward:
    name = spec.reward
    if name not in BUILTIN:
        known = (*BUILTIN, REFERENCE)
        near = nearest(name, known) or f"; built-in are {', '.join(known)}"
        raise RewardError(f"no built-in reward {name!r}, and {_FORMS}{near}")
    library = LIBRARIES.get(name)
    if library is not None and importlib.util.find_spec(library.module) is None:
        raise RewardError(f"reward {name!r} needs {library.module}, which is not installed; {library.install}")
    settings = _settings_of(BUILTIN[name])
    for argument, value in spec.args.items():
        if argument not in settings:
            raise RewardError(_unknown_argument(name, argument, settings))
        _require_type(name, settings[argument], value)
    defaults = {key: setting.default for key, setting in settings.items() if setting.default is not setting.empty}
    bound = functools.partial(BUILTIN[name], **{**defaults, **spec.args})
    _require_settings(name, settings, bound)
    return bound


def _bound_custom(spec: RewardConfig, function: Reward) -> Reward:
    try:
        inputs = inputs_of(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.reward!r} has no signature to call it by; wrap it in a def") from error
    for argument in spec.args:
        if argument in SUPPLIED:
            raise RewardError(f"argument {argument!r} of reward {spec.reward!r} is given by the run; take it out")
        if not inputs.accepts(argument):
            raise RewardError(_unknown_argument(spec.reward, argument, _free_names(inputs)))
    return functools.partial(function, **spec.args) if spec.args else function


def _settings_of(function: Reward) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def _require_type(name: str, setting: inspect.Parameter, value: Any) -> None:
    wanted = setting.annotation
    fits = isinstance(value, (int, float) if wanted is float else wanted) and not isinstance(value, bool)
    if not fits:
        raise RewardError(f"argument {setting.name!r} of reward {name!r} is of type {wanted.__name__}: {value!r}")


def _require_settings(name: str, settings: dict[str, inspect.Parameter], bound: "functools.partial[Any]") -> None:
    missing = [setting for setting in settings if setting not in bound.keywords]
    if missing:
        raise RewardError(f"reward {name!r} needs the arguments {', '.join(missing)}; give them under its `args`")
    if not settings:
        return
    try:
        bound(**{column: [] for column in inputs_of(bound).required})  # scores nothing, so only the settings can fail
    except ValueError as error:
        raise RewardError(f"reward {name!r}: {error}") from error


def _free_names(inputs: Inputs) -> list[str]:
    return [name for name in (*inputs.required, *inputs.optional) if name not in SUPPLIED]


def _unknown_argument(reward: str, argument: str, known: Iterable[str]) -> str:
    names = list(known)
    near = nearest(argument, names) or f"; it takes {', '.join(names) or 'none'}"
    return f"reward {reward!r} takes no argument {argument!r}{near}"


def _check_apart(spec: RewardConfig, columns: list[str], deadline_s: float) -> None:
    question = json.dumps({"spec": spec.model_dump(mode="json"), "columns": columns})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ycore.rewards.check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=reward_environment("check"),
        start_new_session=True,
    )
    try:
        answer, _ = process.communicate(question, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise RewardError(
            f"importing reward {spec.reward!r} did not end within {deadline_s:g} s; "
            "do slow work and slow imports inside the function"
        ) from None
    finally:
        _kill_group(process)
    if not answer:
        raise RewardError(f"importing reward {spec.reward!r} ended its process (status {process.returncode})")
    problem = json.loads(answer)["error"]
    if problem is not None:
        raise RewardError(problem)


def _kill_group(process: "subprocess.Popen[str]") -> None:
    """Also what the imported code started."""
    kill_group_and_below(process.pid)
    process.wait()
