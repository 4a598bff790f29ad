"""The prompts of the benchmark: as many as a step needs, so that every step of both sides has the same ones.

The answers to additions have a few words. Explanations use more or less of the allowed tokens, and stories all of
them.
"""

import json
import random
from pathlib import Path

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import load_prompts

KINDS = ("additions", "explanations", "stories")

_WHO = (
    "a lonely lighthouse keeper",
    "an old bear",
    "two sisters",
    "a clockmaker",
    "a small robot",
    "a lost sailor",
)
_WHERE = (
    "on an island in the far north",
    "in a city under the sea",
    "at the edge of a desert",
    "in a forgotten mine",
)
_EVENTS = (
    "finds a letter",
    "learns to sing",
    "builds a bridge",
    "loses a friend",
    "hears a strange sound at night",
)


def write_prompts(folder: Path, *, kind: str, num_prompts: int, seed: int) -> Path:
    """Write `folder/train.jsonl`, a dataset that both sides read; `kind` is one of KINDS."""
    make = {"additions": additions, "explanations": explanations, "stories": stories}[kind]
    texts = make(num_prompts, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": text}], "prompt_index": i}
        for i, text in enumerate(texts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def additions(num_prompts: int, *, seed: int) -> list[str]:
    """Load questions of `task:addition?digits=1`."""
    config = RunConfig(
        model="none",
        dataset="task:addition?digits=1",
        rewards=[RewardConfig(reward="exact_answer")],
        output="none",
        seed=seed,
        limit=num_prompts,
    )
    return [str(prompt.content) for prompt in load_prompts(config).prompts]


def explanations(num_prompts: int, *, seed: int) -> list[str]:
    """Ask for an explanation of the same sums."""
    sums = [text.partition("?")[0] for text in additions(num_prompts, seed=seed)]
    return [f"{text}? Explain how you get the answer." for text in sums]


def stories(num_prompts: int, *, seed: int) -> list[str]:
    """Draw distinct requests for a story; the same ones for the same seed."""
    every = [
        f"Tell a short story about {who} {where} who {event}."
        for who in _WHO
        for where in _WHERE
        for event in _EVENTS
    ]
    return random.Random(seed).sample(every, num_prompts)
