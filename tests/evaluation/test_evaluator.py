"""All prompts of an evaluation are written as one stream, and its files are in the order of the prompts."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ycore.errors import RunError
from ycore.evaluation.evaluator import _write_all
from ycore.round.meters import RoundMeter
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.types import Completion, Draw, Group, Prompt, Score

NUM_PROMPTS = 130
MAX_IN_FLIGHT = 3


class ScriptedController:
    """Writes the first prompt until the last has been begun: all others pass it."""

    def __init__(self, score_of: Callable[[int], Score]) -> None:
        peers: Any = SimpleNamespace(bytes_sent=0)
        self.meter = RoundMeter([], peers, ())
        self._score_of = score_of
        self.draws = SimpleNamespace(draw=self._draw)
        self.rules = SimpleNamespace(max_in_flight=MAX_IN_FLIGHT, reward_weights=(1.0,))
        self.num_drawn = self.num_writing = self.most_writing = 0
        self.last_began = asyncio.Event()

    def _draw(self) -> Draw:
        draw = Draw(self.num_drawn, Prompt(self.num_drawn, "p"), (1,))
        self.num_drawn += 1
        return draw

    async def group(self, draw: Draw, *, step: int) -> Any:
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        if draw.position == NUM_PROMPTS - 1:
            self.last_began.set()
        await (self.last_began.wait() if draw.position == 0 else asyncio.sleep(0))
        self.num_writing -= 1
        completion = Completion((1,), None, f"text {draw.position}", "stop", 0)
        score = self._score_of(draw.position)
        return SimpleNamespace(group=Group(draw, (completion,), ((score,),)))

    def count(self, group: Group) -> None:
        self.meter.count(group, (1.0,))

    def run_round(self, work: Any, *, step: int, trains: bool) -> list[Group]:
        assert not trains
        groups: list[Group] = asyncio.run(asyncio.wait_for(work, timeout=30))
        return groups


def test_no_prompt_waits_for_a_long_completion_of_another(tmp_path: Path) -> None:
    """They were written 64 at a time: engines idled until the longest of each 64 had ended."""
    controller: Any = ScriptedController(lambda position: Score(float(position)))
    folder = RunFolder(tmp_path)
    groups = _write_all(controller, NUM_PROMPTS, folder)
    in_order = list(range(NUM_PROMPTS))
    assert [group.draw.position for group in groups] == in_order
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == in_order
    assert controller.most_writing == MAX_IN_FLIGHT
    rows = [(row["step"], row["reward"]) for row in read_metrics(folder.metrics)]
    assert rows == [(number, (number - 1) / 2) for number in (64, 128, NUM_PROMPTS)]


def test_an_evaluation_that_is_started_again_writes_all_rows_again(tmp_path: Path) -> None:
    controller: Any = ScriptedController(lambda position: Score(float(position)))
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 64, "reward": 1.0}\n{"step": 128, "rew')
    _write_all(controller, NUM_PROMPTS, folder)
    said: list[str] = []
    rows = [row["step"] for row in read_metrics(folder.metrics, say=said.append)]
    assert rows == [64, 128, NUM_PROMPTS] and said == []


def test_a_reward_that_never_scores_ends_it_long_before_the_last_prompt(tmp_path: Path) -> None:
    controller: Any = ScriptedController(lambda position: Score(None, problem="no such file"))
    controller.last_began.set()
    with pytest.raises(RunError, match=r"all 64 failed .no such file.; correct the reward"):
        _write_all(controller, NUM_PROMPTS, RunFolder(tmp_path))
    num_written = len((tmp_path / "completions.jsonl").read_text().splitlines())
    assert 64 <= num_written <= 64 + MAX_IN_FLIGHT
