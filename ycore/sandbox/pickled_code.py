"""Name rewards, tools and environments that are given as Python objects, so that a confined worker can load them.

A function or class of a module is its file and name. One of a script or a notebook, or one that no name finds (a
closure, a lambda, a partial), is pickled by cloudpickle into a Python file: a process that imported the script would
start the script's run again. Only confined workers import that file.
"""

import base64
import functools
import inspect
import io
import itertools
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.errors import RewardError
from ycore.run.files import named_by_content, write_bytes_atomic

_WAY_OUT = "write it into a file, with what it uses, and give file.py:name"


def code_references(values: Sequence[Any], file: Path, *, kind: str = "reward") -> list[Any]:
    """Return rewards, tools or environments as a config takes them: code as `file.py:name`, all else as it is.

    Args:
        values: names, declarations with a `reward`, functions and classes.
        file: takes the pickled code, with a hash of its source in the name: a run is not resumed with other source by
            mistake. Values that the code holds are written anew at each start.
        kind: `reward`, `tool` or `environment`, which is a class.

    Raises:
        RewardError: an object cannot be sent to another process.
    """
    rewards: list[Any] = [
        value["reward"] if isinstance(value, Mapping) else value for value in values
    ]
    for reward in filter(callable, rewards):
        _require_kind(reward, kind)
    code = {
        id(reward): reward
        for reward in rewards
        if callable(reward) and not _is_importable(reward)
    }
    names = dict(zip(code, _distinct_names(code.values(), kind), strict=True))
    if code:
        sources = "".join(_source_of(reward) for reward in code.values())
        file = named_by_content(file, sources.encode())
        _write({names[key]: reward for key, reward in code.items()}, file, kind)

    def reference_of(reward: Any) -> Any:
        if id(reward) in names:
            return f"{file}:{names[id(reward)]}"
        return f"{_file_of(reward)}:{reward.__name__}" if callable(reward) else reward

    return [
        {**value, "reward": reference_of(reward)}
        if isinstance(value, Mapping)
        else reference_of(reward)
        for value, reward in zip(values, rewards, strict=True)
    ]


def _source_of(code: Any) -> str:
    """Return the source of a function, a class or what a partial calls; its name where there is none."""
    while isinstance(code, functools.partial):
        code = code.func
    try:
        return inspect.getsource(code if isinstance(code, type) else inspect.unwrap(code))
    except (OSError, TypeError):
        return str(getattr(code, "__qualname__", type(code)))


def _write(objects: Mapping[str, Any], file: Path, kind: str) -> None:
    data = base64.b64encode(_pickled(objects, kind))
    text = (
        f'"""{", ".join(objects)}: pickled, for confined workers alone."""\n\n'
        "import base64\nimport pickle\n\n"
        f"globals().update(pickle.loads(base64.b64decode({data!r})))\n"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(file, text.encode())


def _require_kind(value: Any, kind: str) -> None:
    wanted = {"environment": type, "tool": types.FunctionType}.get(kind)
    if wanted is not None and (not isinstance(value, wanted) or value.__module__ == "builtins"):
        name = getattr(value, "__qualname__", type(value).__name__)
        raise RewardError(
            f"the {kind} {name} is a {type(value).__name__} and no plain "
            f"{'class' if wanted is type else 'function'}; {_WAY_OUT}"
        )


def _is_importable(value: Any) -> bool:
    """Whether another process finds a function or class by its name at the top of its module's file."""
    return (
        isinstance(value, type | types.FunctionType)
        and value.__module__ != "__main__"
        and getattr(sys.modules.get(value.__module__), value.__name__, None) is value
        and _file_of(value) is not None
    )


def _file_of(value: Any) -> Path | None:
    file = getattr(sys.modules[value.__module__], "__file__", None)
    return None if file is None else Path(file).resolve()


def _distinct_names(code: Iterable[Any], kind: str) -> list[str]:
    """Return an identifier for each object, numbered from its second occurrence on."""
    names: list[str] = []
    for value in code:
        function = value.func if isinstance(value, functools.partial) else value
        name = getattr(function, "__name__", "")
        name = name if name.isidentifier() else kind
        candidates = itertools.chain(
            [name], (f"{name}_{number}" for number in itertools.count(2))
        )
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _pickled(objects: Mapping[str, Any], kind: str) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Cached functions too, which pickle writes by their name alone."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, functools._lru_cache_wrapper):
                return _cached, (value.__wrapped__, value.cache_parameters())
            return super().reducer_override(value)

    def dumps(value: Any) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return buffer.getvalue()

    for name, value in objects.items():
        try:
            dumps(value)
        except Exception as error:  # noqa: BLE001 (whatever a `__reduce__` of the person's raises)
            reason = " ".join(str(error).split())
            raise RewardError(
                f"the {kind} {name} cannot be sent to a worker, which is another process: {reason}; {_WAY_OUT}"
            ) from None
    return dumps(dict(objects))


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)
