"""One rank of training runs on recorded rounds: `accelerate launch ... recorded_run.py JOBS.json`. A test tool.

One run after another in one process, because its imports take longer than a run. The same global rounds whatever the
number of ranks: rank r of n trains on groups r, r + n, ... of each. A run leaves the metrics of every step, and the
weights as an engine would get them before the first step and after the last.
"""

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from accelerate.state import AcceleratorState, GradientState
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer import grpo_trainer

from tests.distributed import fsdp_on_cpu
from ycore.config.algorithms import find_algorithm
from ycore.config.schema import RunConfig
from ycore.engine.weights import write_weights
from ycore.run.files import RunFolder
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import this_rank
from ycore.trl.build import build_trainer, compute_dtype
from ycore.types import Completion, Draw, Group, Prompt, Score

MAX_TOKENS = 9


def recorded_round(step: int, *, num_groups: int, group_size: int) -> list[Group]:
    """Groups of unequal lengths with the rewards and the engine's logprobs of a made-up policy."""
    dice = random.Random(step)
    groups = []
    for index in range(num_groups):
        prompt_ids = tuple(dice.randrange(6, 90) for _ in range(1 + 3 * index))
        completions, scores = [], []
        for _ in range(group_size):
            length = dice.randrange(1, MAX_TOKENS + 1)
            token_ids = tuple(dice.randrange(6, 90) for _ in range(length))
            logprobs = tuple(-4.6 + dice.uniform(-0.2, 0.2) for _ in range(length))
            completions.append(Completion(token_ids, logprobs, "", "length", step))
            taught = tuple(
                logprob + 0.3 * math.sin(token)
                for logprob, token in zip(logprobs, token_ids, strict=True)
            )
            scores.append(
                (Score(dice.random(), logprobs=taught),)
            )  # the teacher's, of the run that has one
        prompt = Prompt(row=index, content=f"step {step} group {index}", columns={})
        groups.append(Group(Draw(index, prompt, prompt_ids), tuple(completions), tuple(scores)))
    return groups


class Recorded:
    def __init__(self, rank: int, world: int, group_size: int) -> None:
        self._rank, self._world, self._group_size = rank, world, group_size

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        groups = recorded_round(
            step, num_groups=num_groups * self._world, group_size=self._group_size
        )
        return groups[self._rank :: self._world]


class Rows(TrainerCallback):
    """A row a step, of what TRL logs."""

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
    ) -> None:
        if "reward" in logs and state.is_world_process_zero:
            self._writer.write({"step": state.global_step, **logs})


def main() -> None:
    fsdp_on_cpu.allow()
    gather_object = grpo_trainer.gather_object
    for job in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        run(find_algorithm(job["algorithm"]).config.model_validate(job), gather_object)


def run(config: RunConfig, gather_object: Any) -> None:
    folder, rank = RunFolder(Path(config.output)), this_rank()
    folder.root.mkdir(exist_ok=True, parents=True)
    asked_for: list[int] = []

    def counted(items: list[object]) -> list[object]:
        asked_for.extend(str(item).startswith("step ") for item in items)
        gathered: list[object] = gather_object(items)
        return gathered

    grpo_trainer.gather_object = counted
    trainer = build_trainer(
        config,
        folder,
        model=Path(config.model),
        tokenizer=AutoTokenizer.from_pretrained(config.model),
        callbacks=[Rows(MetricsWriter(folder.metrics))],
        world_size=rank.world,
    )
    trainer.rounds = Recorded(rank.number, rank.world, config.group_size)
    share(trainer, folder, config, "before", writes=rank.number == 0)
    trainer.train()
    share(trainer, folder, config, "after", writes=rank.number == 0)
    trainer.save_model(str(folder.model))
    report = {
        "prompts_gathered": sum(asked_for),
        "prompts_held": sorted(set(trainer._logs["prompt"])),
    }
    (folder.root / f"rank-{rank.number}.json").write_text(json.dumps(report))


def share(
    trainer: object, folder: RunFolder, config: RunConfig, name: str, *, writes: bool
) -> None:
    write_weights(
        trainer.bare_model, folder.root / name, dtype=compute_dtype(config), writes=writes
    )  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
