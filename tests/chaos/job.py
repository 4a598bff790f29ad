"""The run that the scorecard repeats: a tiny model, a few prompts, a reward, and the command line that trains on them.

It is small, but has everything that a resume could lose: dropout, which draws random numbers in training; several
micro-batches a step; a learning rate that changes at every step; adapters, whose optimizer has a state.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.tiny_model import write_tiny_model

Tier = Literal["scripted", "vllm"]

_REWARD = '''"""Pure functions of the completion, so that a run repeats."""

import os
import subprocess
import time


def variety(prompts, completions, **columns):
    """Different characters, of eight; takes a moment, so that a worker can be met at work."""
    time.sleep(0.02)
    return [len(set(completion[-1]["content"])) / 8 for completion in completions]


def variety_or_dull(prompts, completions, dull, **columns):
    """As above, but nothing for every completion of a dull prompt, from which then nothing can be learned."""
    rewards = variety(prompts, completions)
    return [0.0 if is_dull else reward + number / 64 for number, (reward, is_dull) in enumerate(zip(rewards, dull))]


daemons = []


def with_daemon(prompts, completions, name, **columns):
    """As above, and leaves a daemon behind: in its own session, with an empty environment."""
    if not daemons:
        command = ["sh", "-c", "while true; do sleep 1; done", name]
        daemons.append(subprocess.Popen(command, start_new_session=True, env={"PATH": "/usr/bin:/bin"}))
    return variety(prompts, completions)


def with_orphan(prompts, completions, name, **columns):
    """The daemon's parent ends at once, after a double fork: nothing below this process shows it."""
    if not daemons:
        daemons.append(os.fork())
        if daemons[0] == 0:
            os.setsid()
            daemons.clear()
            with_daemon([], [], name)
            os._exit(0)
        os.waitpid(daemons[0], 0)
    return variety(prompts, completions)


def ending_after_orphan(prompts, completions, name, **columns):
    """As above, and then this process ends too."""
    with_orphan(prompts, completions, name)
    os._exit(0)
'''

CALLED = "is called"
"""Tools print this when they are called."""

_WORLD = f'''"""A tool and an environment that draws at every call, as ones that repeat only where they are seeded."""

import random
import time


def be_met():
    """Say so, and take a moment, so that a call can be met under way."""
    print("{CALLED}", flush=True)
    time.sleep(0.1)


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: The number.
    """
    be_met()
    return 2 * x


class Walk:
    def reset(self, **row):
        self.at = random.randint(10, 99)
        return f" from {{self.at}}"

    def walk(self, by: int) -> int:
        """Go on.

        Args:
            by: How far.
        """
        be_met()
        self.at += by * random.randint(1, 9)
        return self.at

    def get_reward(self):
        return self.at / 100
'''

_JUDGE = """rubric: Is it good?
verdict: {kind: json, min: 0, max: 1}
fence: false
max_model_len: 512
max_tokens: 64
"""

DAEMON = "ycore-selftest-daemon-"
"""How the name of a daemon begins, in its command line."""


NUM_ROWS = 64


def is_dull(row: int) -> bool:
    """Whether nothing can be learned from this row, where the reward is `variety_or_dull`."""
    return row % 3 == 0


@dataclass(frozen=True, slots=True)
class Job:
    """A training run of the scorecard; all runs of one scorecard share `inputs`."""

    inputs: Path
    tier: Tier = "scripted"
    engine: Literal["vllm", "transformers"] = "vllm"
    steps: int = 8
    checkpoint_every: int = 2
    seed: int = 0
    more: tuple[str, ...] = ()
    """Further words of the command line."""

    think_s: float = 0.01
    """Seconds that the scripted engine waits before each answer."""

    reward: str = "variety"
    has_judge: bool = False
    has_world: bool = False
    """Whether completions have turns, with a tool and an environment."""

    ranks: int = 1
    """Trainer ranks, each with its own engine."""

    def words(self, output: Path) -> list[str]:
        """Return the command line after `ycore`."""
        options: dict[str, object] = {
            "--model": self.inputs / "model",
            "--dataset": self.inputs / "train.jsonl",
            "--reward": f"{self.inputs / 'rewards.py'}:{self.reward}",
            "--output": output,
            "--steps": self.steps,
            "--prompts-per-step": 4,
            "--group-size": 4,
            "--max-tokens": 96 if self.has_world else 12,
            "--engine": self.engine,
            "--learning-rate": 1e-3,
            "--per-device-train-batch-size": 4 // self.ranks,
            "--seed": self.seed,
        }
        keys = {
            "checkpoint_every": self.checkpoint_every,
            "dtype": "float32",
            "lora.dropout": 0.2,
            "engine.count": self.ranks,
            "processes": self.ranks,
            "engine.max_model_len": 64,
            "sampling.dynamic": "false",
        }
        option_words = [
            str(word) for option, value in options.items() for word in (option, value)
        ]
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        judge = ["--reward", f"judge:{self.inputs / 'judge.yaml'}"] if self.has_judge else []
        return [
            "grpo",
            *option_words,
            *judge,
            *sets,
            *(self._world() if self.has_world else []),
            *self.more,
        ]

    def _world(self) -> list[str]:
        file, keys = (
            self.inputs / "world.py",
            ("engine.max_model_len=512", "turns.at_once=4", "turns.call_s=30"),
        )
        flags = ["--tools", f"{file}:double", "--env", f"{file}:Walk", "--actions", "calls"]
        flags += ["--keep-journal"]  # each token and each answer of every round is compared
        return [
            *flags,
            "--max-turns",
            "4",
            *(word for key in keys for word in ("--set", key)),
        ]


def write_inputs(folder: Path) -> Path:
    """Write the model, the prompts and the reward that every job of a scorecard reads."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for a model of a hundred thousand numbers
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model")
    rows = [{"prompt": f"{row} + {row + 1} =", "dull": is_dull(row)} for row in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (folder / "rewards.py").write_text(_REWARD, encoding="utf-8")
    (folder / "world.py").write_text(_WORLD, encoding="utf-8")
    (folder / "judge.yaml").write_text(_JUDGE, encoding="utf-8")
    return folder
