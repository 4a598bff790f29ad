"""From a reward's name to its function, with its arguments bound and checked.

What a reward function asks for, read from its signature, and what it is given when it is called.

Importing a person's reward function: `file.py:function` or `package.module:function`.

Not here: the built-in functions (`builtin`), importing a person's file (`importing`), and calling (`worker`).
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError, nearest
from ycore.rewards.builtin import BUILTIN, LIBRARIES, Reward
from ycore.rewards.child import reward_environment
from ycore.rewards.reference import REFERENCE, check_reference, is_reference
from ycore.run.process_tree import kill_tree

SUPPLIED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every call offers beside the dataset's columns; TRL's names."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The parameters of one reward function that are not bound to arguments yet."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    bound: tuple[str, ...]
    takes_any: bool

    def accepts(self, name: str) -> bool:
        """Whether a call should pass `name`. A bound argument stands, even where a column has its name."""
        return name not in self.bound and (self.takes_any or name in self.required or name in self.optional)


def inputs_of(function: Callable[..., Any]) -> Inputs:
    """Read from the signature; of a partial, the keywords it holds are bound."""
    bound = tuple(function.keywords) if isinstance(function, functools.partial) else ()
    free = [parameter for name, parameter in inspect.signature(function).parameters.items() if name not in bound]
    named = [parameter for parameter in free if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    return Inputs(
        required=tuple(parameter.name for parameter in named if parameter.default is parameter.empty),
        optional=tuple(parameter.name for parameter in named if parameter.default is not parameter.empty),
        bound=bound,
        takes_any=any(parameter.kind is parameter.VAR_KEYWORD for parameter in free),
    )


def require_columns(inputs: Inputs, columns: Iterable[str], *, reward: str) -> None:
    """Refuse a reward that asks for a column that the dataset does not have."""
    known = sorted(set(columns))
    for name in inputs.required:
        if name in SUPPLIED or name in known:
            continue
        raise RewardError(
            f"reward {reward!r} asks for the column {name!r}, and the dataset has {', '.join(known) or 'no columns'}"
            f"{_way_out(name, known)}"
        )


def call_arguments(inputs: Inputs, request: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of one call, from a worker's request."""
    offered = {
        **request["inputs"],
        "trainer_state": SimpleNamespace(global_step=request["step"]),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    return {name: value for name, value in offered.items() if inputs.accepts(name)}


def _way_out(name: str, known: list[str]) -> str:
    if name == "answer":
        return "; name the one that holds the right answer with --answer-column"
    near = nearest(name, [*SUPPLIED, *known])
    return near or "; rename a column, or give the parameter a default"


def _ignore(*_args: Any, **_kwargs: Any) -> None:
    """TRL's `log_extra` and `log_metric`, which rewards may call; a worker keeps no tables."""


_LONGEST_MESSAGE = 300


def import_function(name: str) -> Reward:
    """The function that `name` says; the working folder, and a file's own folder, can be imported from."""
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise RewardError(f"reward {name!r} needs both sides of its colon: file.py:function or package.module:function")
    _import_from(Path.cwd())
    is_file = source.endswith(".py") or "/" in source
    module = _import_file(name, Path(source).expanduser()) if is_file else _import_module(name, source)
    return _function_of(name, module, function)


def one_line(error: BaseException) -> str:
    """An exception as `Type: message`, cut to one line of bounded length."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_LONGEST_MESSAGE] if message else type(error).__name__


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        near = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
        raise RewardError(f"reward {name!r}: no file {path}{near or '; give its path from the working folder'}")
    _import_from(path.resolve().parent)
    # The prefix keeps a file called math.py or types.py from taking the place of another module.
    spec = importlib.util.spec_from_file_location(f"ycore_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r}: importing {path} raised {one_line(error)}") from error
    return module


def _import_module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise RewardError(f"reward {name!r}: importing {source} raised {one_line(error)}") from error
        near = nearest(source, _importable_here()) or "; it must be installed, or lie under the working folder"
        raise RewardError(f"reward {name!r}: no module {error.name!r}{near}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r}: importing {source} raised {one_line(error)}") from error


def _function_of(name: str, module: ModuleType, function: str) -> Reward:
    try:
        found = getattr(module, function)  # not vars(): a module may make its names on demand, as trl.rewards does
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(function, public) or _listed(public)
        raise RewardError(f"reward {name!r}: no function {function!r} there{near}") from None
    if not callable(found):
        raise RewardError(f"reward {name!r}: {function!r} is a {type(found).__name__}; it must be a function")
    reward: Reward = found
    return reward


def _listed(names: list[str]) -> str:
    return f"; it has {', '.join(names[:8])}" if names else "; it has none"


def _importable_here() -> Iterable[str]:
    here = Path.cwd()
    for file in [*here.glob("*.py"), *here.glob("*/*.py")]:
        yield ".".join(file.relative_to(here).with_suffix("").parts)


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


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
    kill_tree(process.pid)
    process.wait()
