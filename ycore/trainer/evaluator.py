"""The evaluator role: `python -m ycore.trainer.evaluator RUN_FOLDER`, one process.

Asks the engines for completions to every prompt, scores them as training would, and leaves `eval.json` (the figures)
and `completions.jsonl` (every completion with its rewards) in the run folder.

Not here: starting engines (`launch`), and training.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ycore.round.sampling import total_reward
from ycore.run.reports import on_stop, run_alone
from ycore.types import Group

RIGHT_FROM = 1.0
"""A completion counts as right for pass@k when the first reward gives at least this."""

_AT_ONCE = 64
"""Prompts under way together: enough for the engines to be busy, few enough to hold."""


def main() -> int:
    """Exit status: 0 finished, 2 the user's mistake, 130 interrupted, 1 anything else."""
    return run_alone("ycore.trainer.evaluator", _evaluate)


def _evaluate(root: Path) -> None:
    from ycore.round.assemble import assemble
    from ycore.run.files import write_json_atomic

    parts = assemble(root)
    engines = parts.vllm_engines() if parts.started.kind == "vllm" else [_own_engine(parts)]
    rounds = parts.controller(engines)
    on_stop(rounds.stop.set)
    try:
        rounds.start(timeout_s=parts.config.engine.start_timeout_s)
        parts.folder.step_began.touch()
        groups = _all_groups(rounds, len(parts.prompts.prompts), parts.folder.metrics, root / "completions.jsonl")
    finally:
        rounds.close()
    names = [reward.reward for reward in parts.config.rewards]
    weights = [reward.weight for reward in parts.config.rewards]
    write_json_atomic(root / "eval.json", figures(groups, names, weights))


def _own_engine(parts: Any) -> Any:
    """Generation by transformers, where there is no vLLM."""
    from transformers import AutoModelForCausalLM

    from ycore.engine.transformers_engine import TransformersEngine
    from ycore.trl.grpo import compute_dtype

    model = AutoModelForCausalLM.from_pretrained(
        parts.started.model, dtype=compute_dtype(parts.config), trust_remote_code=parts.config.trust_remote_code
    )
    return TransformersEngine(model, parts.tokenizer, parts.sampling())


def _all_groups(rounds: Any, num_prompts: int, metrics: Path, completions: Path) -> list[Group]:
    from ycore.run.metrics import MetricsWriter

    done: list[Group] = []
    with MetricsWriter(metrics) as writer, completions.open("w", encoding="utf-8") as file:
        while len(done) < num_prompts:
            groups = rounds.next_round(step=0, num_groups=min(_AT_ONCE, num_prompts - len(done)))
            _write_completions(groups, file)
            done += groups
            writer.write({"step": len(done), "reward": _mean(_first_rewards(done))})
    return done


def _write_completions(groups: Sequence[Group], file: TextIO) -> None:
    for group in groups:
        for completion, scores in zip(group.completions, group.scores_GR, strict=True):
            row = {
                "row": group.draw.prompt.row,
                "prompt": group.draw.prompt.content,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "rewards": [score.value for score in scores],
                "problems": [score.problem for score in scores if score.problem],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def figures(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> dict[str, Any]:
    """The table of `ycore eval`: mean reward, each source's mean, pass@k, and what could not be scored.

    A masked completion is left out of the means, and counts as wrong for pass@k.
    """
    from ycore.run.metrics import pass_at_k

    rows = [scores for group in groups for scores in group.scores_GR]
    totals = [total for scores in rows if (total := total_reward(scores, weights)) is not None]
    right = [sum((scores[0].value or 0.0) >= RIGHT_FROM for scores in group.scores_GR) for group in groups]
    num_samples = len(groups[0].completions)
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    return {
        "num_prompts": len(groups),
        "num_samples": num_samples,
        "reward": _mean(totals),
        **{
            f"rewards/{name}": _mean([scores[r].value for scores in rows if scores[r].value is not None])
            for r, name in enumerate(names)
        },
        **{f"pass@{k}": _mean([pass_at_k(num_samples, c, k) for c in right]) for k in _powers_of_two(num_samples)},
        "mean_length": _mean(lengths),
        "masked": len(rows) - len(totals),
    }


def _powers_of_two(largest: int) -> list[int]:
    powers = [1]
    while powers[-1] * 2 <= largest:
        powers.append(powers[-1] * 2)
    return powers


def _first_rewards(groups: Sequence[Group]) -> list[float]:
    return [scores[0].value for group in groups for scores in group.scores_GR if scores[0].value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    sys.exit(main())
