"""The benchmark of engine settings: what it changes of the engines, and that it asks each of them. Made-up engines."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("engine_settings")


class MadeUpEngine:
    def __init__(self) -> None:
        self.prompts: list[int] = []

    async def write(self, prompt: Sequence[int], seed: int, length: int) -> None:
        self.prompts.append(len(prompt))
        await asyncio.sleep(0.001)


def test_every_prompt_length_is_timed_with_whole_groups(script: Any) -> None:
    engine = MadeUpEngine()
    timings = asyncio.run(script.blocks(engine, 2))
    assert {tokens: len(seconds) for tokens, seconds in timings.items()} == {
        "40": 2,
        "70": 2,
        "140": 2,
    }
    assert engine.prompts.count(40) == 3 * 8 * 8


def test_two_engines_work_in_turn_and_at_once(script: Any) -> None:
    engines = [MadeUpEngine(), MadeUpEngine()]
    timings = asyncio.run(script.spin(engines, 1))
    assert (
        set(timings) == {"in turn", "at once"}
        and min(timings["in turn"] + timings["at once"]) > 0
    )
    assert len(engines[0].prompts) == len(engines[1].prompts) == 2 * 2 * 8


def test_both_ways_to_start_are_timed_in_turn(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextmanager
    def changed(
        job: argparse.Namespace, output: Path, *, variables: dict[str, str]
    ) -> Iterator[None]:
        seen.append(variables[script.FORKED])
        yield

    monkeypatch.setattr(script, "changed", changed)
    timings = dict(script.time_starts(argparse.Namespace(repeats=2, output=tmp_path)))
    assert {start: len(seconds) for start, seconds in timings.items()} == {
        "spawned": 2,
        "forked": 2,
    }
    assert seen == ["0", "1", "0", "1"]


def test_an_engine_is_started_with_what_is_compared(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = script.placement_engines, []

    @contextmanager
    def running(job: argparse.Namespace, output: Path) -> Iterator[Path]:
        engine = module._engine(
            "rollout-0",
            tmp_path,
            SimpleNamespace(socket=tmp_path.joinpath, run_id="a", temporary=tmp_path),
            job,
            0,
        )
        seen.append(
            (module.engine_command(engine), module.engine_environment(engine), engine.cores)
        )
        yield tmp_path

    monkeypatch.setattr(script, "engines_running", running)
    monkeypatch.setattr(sys, "argv", ["engine_settings.py"])
    job, before = script.parse_arguments(), module.engine_command
    with script.changed(
        job, tmp_path, words={"--block-size": "128"}, variables={"A": "1"}, cores=(0, 1)
    ):
        pass
    command, environment, cores = seen[0]
    assert command[-2:] == ["--block-size", "128"], "the last one counts"
    assert environment["A"] == "1" and cores == (0, 1)
    assert module.engine_command is before
