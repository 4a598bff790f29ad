"""Preference pairs from scored completions: of each prompt the best against the worst, or all that differ.

Best and worst as in iterative DPO (RLHF Workflow, arXiv 2405.07863); every comparison of a prompt's answers as for
InstructGPT's reward model (arXiv 2203.02155, section 3.4). A prompt whose completions all have the same reward teaches
nothing and is left out.
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


def write_pairs(folder: Path, *, weights: Sequence[float], compare: Compare, to: Path) -> int:
    """Write the pairs of an evaluation's completions as JSONL, and return their number.

    Args:
        folder: the evaluation's run folder, with completions.jsonl.
        weights: of the reward sources, in their order.

    Raises:
        RunError: there is no pair.
    """
    with (folder / "completions.jsonl").open(encoding="utf-8") as lines:
        pairs = list(make_pairs(map(json.loads, lines), weights, compare=compare))
    if not pairs:
        raise RunError(
            "no prompt has two completions with different rewards, so there is no pair; "
            "raise num_samples or trl.temperature, or take a reward that tells them apart"
        )
    write_bytes_atomic(to, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs).encode())
    return len(pairs)


def make_pairs(
    rows: Iterable[Mapping[str, Any]], weights: Sequence[float], *, compare: Compare
) -> Iterator[dict[str, Any]]:
    """Pairs in the order of the prompts; the same two texts of a prompt make one pair.

    `rows` are those of completions.jsonl, the completions of a prompt one after another. A completion that no source
    scored takes no part.
    """
    for _, group in groupby(rows, key=lambda row: row["row"]):
        scored = []
        for row in group:
            pairs = zip(row["rewards"], weights, strict=True)
            if known := [weight * reward for reward, weight in pairs if reward is not None]:
                scored.append((sum(known), row))
        best_first = sorted(scored, key=lambda pair: -pair[0])
        ends = [(best_first[0], best_first[-1])] if best_first else []
        seen: set[tuple[str, str]] = set()
        for (best, chosen), (worst, rejected) in combinations(best_first, 2) if compare == "all" else ends:
            texts = (chosen["completion"], rejected["completion"])
            if best - worst <= _EQUAL or texts in seen:
                continue
            seen.add(texts)
            answers: list[Any] = list(texts)
            if not isinstance(chosen["prompt"], str):  # a chat is answered by a turn
                answers = [[{"role": "assistant", "content": text}] for text in texts]
            pair = {"prompt": chosen["prompt"], "chosen": answers[0], "rejected": answers[1]}
            yield pair | {"chosen_reward": best, "rejected_reward": worst}
