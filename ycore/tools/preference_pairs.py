"""Preference pairs from scored completions: of each prompt the best against the worst, or all that differ.

Best and worst as in iterative DPO (RLHF Workflow, arXiv 2405.07863); every comparison of a prompt's answers as for
InstructGPT's reward model (arXiv 2203.02155, section 3.4). A prompt whose completions all have one reward teaches
nothing and is left out.

Not here: writing and scoring the completions (`roles.evaluator`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from ycore.errors import RunError
from ycore.run.files import write_bytes_atomic
from ycore.tools.stages import Compare

_EQUAL = 1e-6


def make_pairs(
    rows: Iterable[Mapping[str, Any]], weights: Sequence[float], *, compare: Compare
) -> Iterator[dict[str, Any]]:
    """Pairs, in the order of the prompts; of the same two texts one.

    Args:
        rows: completions as `completions.jsonl` has them, those of a prompt one after another: `row`, `prompt`,
            `completion` and `rewards`, one number or None a reward source.
        weights: of the sources; a completion that no source scored takes no part.
    """
    for _, group in groupby(rows, key=lambda row: row["row"]):
        scored = [(total, row) for row in group if (total := _total(row["rewards"], weights)) is not None]
        best_first = sorted(scored, key=lambda pair: -pair[0])
        compared = (
            combinations(best_first, 2) if compare == "all" else zip(best_first[:1], best_first[-1:], strict=True)
        )
        seen: set[tuple[str, str]] = set()
        for better, worse in compared:
            texts = (better[1]["completion"], worse[1]["completion"])
            if better[0] - worse[0] > _EQUAL and texts not in seen:
                seen.add(texts)
                yield _pair(better, worse)


def write_pairs(folder: Path, *, weights: Sequence[float], compare: Compare, to: Path) -> int:
    """The pairs of an evaluation's completions, as a JSONL file; how many. RunError where there is none."""
    with (folder / "completions.jsonl").open(encoding="utf-8") as lines:
        pairs = list(make_pairs((json.loads(line) for line in lines), weights, compare=compare))
    if not pairs:
        raise RunError(
            "no prompt has two completions with different rewards, so there is no pair; "
            "raise num_samples or trl.temperature, or take a reward that tells them apart"
        )
    write_bytes_atomic(to, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs).encode())
    return len(pairs)


def _pair(best: tuple[float, Mapping[str, Any]], worst: tuple[float, Mapping[str, Any]]) -> dict[str, Any]:
    prompt = best[1]["prompt"]
    is_chat = not isinstance(prompt, str)
    return {
        "prompt": prompt,
        "chosen": _answer(best[1]["completion"], is_chat=is_chat),
        "rejected": _answer(worst[1]["completion"], is_chat=is_chat),
        "chosen_reward": best[0],
        "rejected_reward": worst[0],
    }


def _answer(text: str, *, is_chat: bool) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": text}] if is_chat else text


def _total(rewards: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    return sum(known) if known else None
