"""Rows: wrong command lines, right command lines, and thousands of random configurations.

A random configuration mixes keys of ycore and TRL, in their places and out of them, with values of every kind.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from tests.chaos.bench import Bench, Row
from tests.chaos.command_lines import BAD, GOOD, command_words, write_place
from tests.chaos.runs import Setting
from ycore.config.presets import presets
from ycore.config.resolve import check_needs, require_rollouts, resolve
from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import derive_batch, trl_arguments
from ycore.config.trl_fields import fields_of
from ycore.errors import YcoreError
from ycore.run.files import RunFolder

_WITHIN_S = 10.0
_NUM_MADE_UP = 10_000
_SETTLED_S = (
    60.0  # a machine that is busy with other things is no reason to call an answer wrong
)


def bad_input_row(bench: Bench) -> Row:
    """Exit status 2, one line that says what is expected, nothing else, in 10 s."""
    place = write_place(bench.place / "bad-input")
    problems = list(
        bench.pool.map(lambda case: _problem_of_bad(bench.setting, place, *case), BAD)
    )
    return _row(
        "bad-input",
        "wrong command lines refused in one line, in 10 s",
        [more for more, _ in BAD],
        problems,
    )


def good_input_row(bench: Bench) -> Row:
    """Exit status 0."""
    place = write_place(bench.place / "good-input")
    problems = list(
        bench.pool.map(lambda more: _problem_of_good(bench.setting, place, more), GOOD)
    )
    return _row("good-input", "right command lines, none refused", GOOD, problems)


def made_up_row(bench: Bench) -> Row:
    """In this process: a configuration is accepted or refused in ycore's own words; anything else is a failure."""
    accepted, failures = check_made_up(_NUM_MADE_UP, seed=bench.seed)
    return Row(
        "made-up",
        "made-up configurations without an unhandled exception",
        _NUM_MADE_UP - len(failures),
        _NUM_MADE_UP,
        failures=tuple(failures),
        more={"accepted": accepted, "refused": _NUM_MADE_UP - accepted - len(failures)},
    )


def _row(
    name: str, description: str, cases: Sequence[str], problems: Sequence[str | None]
) -> Row:
    failures = tuple(
        f"{case or '(nothing more)'}: {problem}"
        for case, problem in zip(cases, problems, strict=True)
        if problem
    )
    return Row(name, description, len(cases) - len(failures), len(cases), failures=failures)


def _problem_of_bad(setting: Setting, place: Path, more: str, words: str) -> str | None:
    done, seconds = _run(setting, place, more)
    if done is None or seconds > _WITHIN_S:
        return f"no answer within {_WITHIN_S:.0f} s"
    if done.returncode != 2:
        return f"exit status {done.returncode}"
    if done.stdout or done.stderr.count("\n") != 1 or not done.stderr.startswith("error: "):
        return f"not one error line: {(done.stdout + done.stderr)[:200]!r}"
    expected = words.format(place=place)
    return None if expected in done.stderr else f"no {expected!r} in {done.stderr[:200]!r}"


def _problem_of_good(setting: Setting, place: Path, more: str) -> str | None:
    done, _ = _run(setting, place, more)
    if done is None:
        return f"no answer within {_SETTLED_S:.0f} s"
    return (
        None
        if done.returncode == 0
        else f"exit status {done.returncode}: {done.stderr.strip()[:300]}"
    )


def _run(
    setting: Setting, place: Path, more: str
) -> tuple["subprocess.CompletedProcess[str] | None", float]:
    words = command_words(more, place)
    began = time.monotonic()
    try:
        done = subprocess.run(
            replace(setting, scripted=None).command(words),
            cwd=setting.place,
            env=setting.full_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SETTLED_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    return done, time.monotonic() - began


_TEXTS = (
    "",
    "a",
    "auto",
    "none",
    "null",
    "true",
    "vllm",
    "8",
    "-1",
    "1e-5",
    "nan",
    "ünï",
    "a/b",
    "x" * 300,
    "{",
    "[1",
)
_NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    64,
    -1,
    2**31,
    2**64,
    0.0,
    0.5,
    -0.5,
    1e-5,
    1e308,
    float("inf"),
    float("nan"),
)
_RIGHT: dict[str, tuple[Any, ...]] = {
    "steps": (1, 100),
    "seed": (0, 7, "3"),
    "group_size": (2, 4, 8),
    "prompts_per_step": (2, 8, 64),
    "max_tokens": (1, 64, 256),
    "lora": (None, {}, {"r": 4}),
    "dtype": ("auto", "float32", "bfloat16"),
    "preset": (None, *presets()),
    "checkpoint_every": (None, 1, 5),
    "merge": (True, False),
    "engine": ({}, {"count": 1}, {"kind": "transformers"}),
    "sampling": ({"dynamic": False}, {"max_age": 0}),
    "learning_rate": (1e-5, "1e-4", 0),
    "beta": (0.0, "0.1"),
    "per_device_train_batch_size": (4, "8"),
    "gradient_accumulation_steps": (2, "4"),
    "loss_type": ("grpo", "dr_grpo"),
    "save_total_limit": (2, None),
}
_SEVERAL = 5
_RESOLVED_WITHIN_S = 2.0

Source = random.Random


def check_made_up(count: int, *, seed: int) -> tuple[int, list[str]]:
    """How many were accepted, and those from which something else came than a config or an error of ycore's."""
    source, accepted, failures = Source(f"made-up/{seed}"), 0, []
    for number in range(count):
        typed = make_up(source)
        try:
            with _within(_RESOLVED_WITHIN_S):
                accepted += _is_accepted(*typed)
        except Exception as error:  # noqa: BLE001 - anything that gets here is what this looks for
            failures.append(f"{number}: {type(error).__name__}: {error} from {typed}"[:500])
    return accepted, failures


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """TimeoutError, raised into whatever goes on; in the main thread only."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def make_up(source: Source) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """A recipe, `--set`s and options: mostly right, so that checks behind the first ones are reached too."""
    recipe: dict[str, Any] = {
        "model": "m",
        "dataset": "d",
        "rewards": ["exact_answer"],
        "output": "o",
    }
    for _ in range(source.randrange(_SEVERAL)):
        _put(recipe, _key(source), source)
    sets = [
        f"{_path(source)}={_value(source, depth=1)}" for _ in range(source.choice((0, 0, 1)))
    ]
    options: dict[str, Any] = {}
    for _ in range(source.randrange(3)):
        _put(options, _key(source), source)
    if source.random() < 0.5:
        options["trl"] = {}
        for _ in range(source.randrange(_SEVERAL)):
            _put(options["trl"], _trl_field(source), source)
    return recipe, sets, options


def _put(where: dict[str, Any], key: str, source: Source) -> None:
    """Mostly a value that belongs there, where one is known."""
    right = _RIGHT.get(key)
    where[key] = source.choice(right) if right and source.random() < 0.9 else _value(source)


def _is_accepted(recipe: dict[str, Any], sets: Sequence[str], options: dict[str, Any]) -> bool:
    try:
        config = require_rollouts(resolve(recipe=recipe, sets=sets, options=options))
        batch = derive_batch(config, world_size=1, on_cpu=True)
        check_needs(config)
        trl_arguments(config, batch, RunFolder(Path(config.output)))
    except YcoreError:
        return False
    return True


def _key(source: Source) -> str:
    return _name(source, list(RunConfig.model_fields))


def _trl_field(source: Source) -> str:
    return _name(source, list(fields_of("GRPOConfig")))


def _name(source: Source, names: Sequence[str]) -> str:
    """Mostly one with known values, then any, now and then a mistyped one or no name at all."""
    known = [name for name in names if name in _RIGHT]
    draw = source.random()
    if draw < 0.7:
        return source.choice(known)
    if draw < 0.95:
        return source.choice(names)
    return source.choice((*_TEXTS, _mistyped(source.choice(names), source)))


def _path(source: Source) -> str:
    inner = (
        "engine.count",
        "engine.kind",
        "lora.r",
        "lora.dropout",
        "sampling.dynamic",
        "rewards.0.weight",
        "trl.beta",
    )
    choose: Callable[[], str] = source.choice(
        (lambda: _key(source), lambda: f"trl.{_trl_field(source)}", lambda: "")
    )
    return source.choice(inner) if source.random() < 0.5 else choose()


def _value(source: Source, *, depth: int = 0) -> Any:
    kind = source.random()
    if kind < 0.5:
        return source.choice(_NUMBERS)
    if kind < 0.75:
        return source.choice((*_TEXTS, *presets())) if depth or source.random() < 0.8 else None
    if kind < 0.85 or depth > 1:
        return source.choice((True, False, None))
    if kind < 0.93:
        return [_value(source, depth=depth + 1) for _ in range(source.randrange(3))]
    return {_key(source): _value(source, depth=depth + 1) for _ in range(source.randrange(3))}


def _mistyped(name: str, source: Source) -> str:
    place = source.randrange(len(name) + 1)
    return name[:place] + source.choice("_-x1") + name[place:]
