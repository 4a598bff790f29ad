"""What the commands print: text for people, or exactly one JSON object on standard output.

Not here: the run's progress, which is the run's own.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any


@contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """While it lasts, whatever this process or a child of it writes to standard output goes to standard error."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_json(value: Mapping[str, Any]) -> None:
    """One line on standard output; numbers that JSON does not have become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns, the first as wide as its longest entry."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())


def number(value: Any) -> str:
    """A number as a person reads it: `0.4167`, `60`, `1.0e-05`."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
