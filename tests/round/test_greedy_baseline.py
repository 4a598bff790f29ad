"""ReMax's baseline in the round: one greedy completion a prompt, scored like the others and not trained on."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rollout.talks import rules_alone
from tests.scoring.pools import pool_in
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.engine import Engine as BaseEngine
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.types import Completion, Finished, Prompt, Score, from_bytes, to_bytes

REWARD = """
def digit(completions, **columns):
    return [float(text) for text in completions]
"""


class Engine(BaseEngine):
    """An Engine without a process: it writes 1, and greedily the last digit of the prompt."""

    name = "one"

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def load_weights(self, folder: Path, version: int) -> None:
        pass

    async def close(self) -> None:
        pass

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        raise AssertionError("no reward of this run asks")

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        self.asked.append((prompt_ids[0], greedy))
        return Completion((1,), (-1.0,), str(prompt_ids[0] % 10) if greedy else "1", "stop", 0)


async def run_round(engine: Engine, folder: Path, *, greedy: bool) -> list[Finished]:
    prompts = [Prompt(row, f"prompt {row}") for row in range(3)]
    draws = DrawSource(prompts, seed=None, encode=lambda p: (p.row + 10,), max_prompt_tokens=5)
    rules = Rules(group_size=2, seed=5, reward_weights=(1.0,), greedy_baseline=greedy)
    specs, settings = (
        [RewardConfig(reward=f"{folder}/their.py:digit")],
        RewardSettings(workers=1),
    )
    async with pool_in(folder / "run", *specs, settings=settings) as pool:
        controller = Controller(
            engines=[engine], scoring=rules_alone(pool), draws=draws, rules=rules, peers=Peers()
        )
        return await asyncio.wait_for(controller.fill(need=3, ready=0, step=0), 30)


@pytest.mark.parametrize("greedy", [True, False])
def test_one_greedy_completion_a_prompt(greedy: bool, tmp_path: Path) -> None:
    (tmp_path / "their.py").write_text(REWARD)
    engine = Engine()
    groups = [item.group for item in asyncio.run(run_round(engine, tmp_path, greedy=greedy))]
    assert sorted(engine.asked) == sorted(
        (row + 10, kind) for row in range(3) for kind in [False, False, True][: 2 + greedy]
    )
    assert all(len(group.completions) == len(group.scores_GR) == 2 for group in groups), (
        "it is not trained on"
    )
    baselines = [group.greedy_scores_R for group in groups]
    assert baselines == (
        [(Score(0.0),), (Score(1.0),), (Score(2.0),)] if greedy else [None] * 3
    )
    assert [from_bytes(to_bytes(group)) for group in groups] == groups, "the journal keeps it"


def test_a_group_teaches_where_it_differs_from_its_greedy_completion(tmp_path: Path) -> None:
    """All rewards of a group are 1: only against a greedy 1 is there nothing to learn."""
    (tmp_path / "their.py").write_text(REWARD)
    finished = asyncio.run(run_round(Engine(), tmp_path, greedy=True))
    assert [item.teaches for item in finished] == [True, False, True]
