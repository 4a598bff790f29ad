"""`python -m ycore.evaluation.evaluator RUN_FOLDER`: complete every prompt, score as training would, write the figures.

With `pairs` the completions are the rows' own, and the figures are of who scores them.

It leaves `eval.json` (the figures) and `completions.jsonl` (every completion with its rewards) in the run folder.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ycore.evaluation.held_out import figures, pair_figures, table_of
from ycore.run.files import sync, write_json_atomic
from ycore.run.interrupt import on_stop
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import run_alone
from ycore.types import Group

if TYPE_CHECKING:
    from ycore.round.assemble import Assembly
    from ycore.round.step import Controller

_OF_PAIRS = ("pairs", "position_bias")
_PROMPTS_AT_ONCE = 64  # enough to keep the engines busy, few enough to hold


def _evaluate(root: Path) -> None:
    from ycore.round.assemble import assemble

    parts = assemble(root)
    pairs = parts.config.pairs
    local = pairs or parts.kind.has_servers
    controller = parts.controller(
        [] if pairs else parts.engines(None if local else load_policy(parts))
    )
    judged: list[tuple[str, float]] = []
    controller.record = lambda name, value: judged.append((name, value))
    on_stop(controller.stop.set)
    try:
        controller.start(timeout_s=parts.config.engine.start_timeout_s)
        parts.folder.step_began.touch()
        groups = _all_groups(
            controller, len(parts.prompts.prompts), parts.folder.metrics, root / "completions.jsonl"
        )
    finally:
        controller.close()
    if pairs:
        found = (
            {"num_pairs": len(groups)} | pair_figures(groups, parts.config) | _position_bias(judged)
        )
    else:
        sizes = {"num_prompts": len(groups), "num_samples": parts.config.num_samples}
        found = sizes | figures(table_of(groups, parts.config), parts.config)
    write_json_atomic(root / "eval.json", found)
    if parts.config.trl.get("report_to") not in (None, "none"):
        from ycore.view.trackers import tell_evaluation

        tell_evaluation(parts.config, parts.folder, found)


def _position_bias(judged: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of all rounds: the share of the pairs in which a judge preferred the same position in both orders."""
    counts, shares = (
        [value for name, value in judged if name == f"ycore/judge/{key}"] for key in _OF_PAIRS
    )
    followed = sum(count * share for count, share in zip(counts, shares, strict=True))
    return {"position_bias": followed / sum(counts)} if counts else {}


def load_policy(parts: "Assembly") -> Any:
    """The run's model as transformers loads it, on the device where there is one with room."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from ycore.engine.sight import image_token_ids
    from ycore.trl.build import compute_dtype
    from ycore.trl.forward import never_write

    kind = AutoModelForCausalLM if parts.sight is None else AutoModelForImageTextToText
    model = kind.from_pretrained(
        parts.started.model,
        dtype=compute_dtype(parts.config),
        trust_remote_code=parts.config.trust_remote_code,
    )
    never_write(model, image_token_ids(model.config.to_dict()))
    return model.to("cuda") if torch.cuda.is_available() and not parts.started.on_host else model


def _all_groups(
    controller: "Controller", num_prompts: int, metrics: Path, completions: Path
) -> list[Group]:
    done: list[Group] = []
    with closing(MetricsWriter(metrics)) as writer, completions.open("w", encoding="utf-8") as file:
        while len(done) < num_prompts:
            groups = controller.next_round(
                step=0, num_groups=min(_PROMPTS_AT_ONCE, num_prompts - len(done))
            )
            _write_completions(groups, file)
            done += groups
            first_rewards = [scores[0].value for group in done for scores in group.scores_GR]
            writer.write({"step": len(done), "reward": mean(first_rewards)})
    for path in (metrics, completions):
        sync(path)  # before anything says that the evaluation has finished
    return done


def _write_completions(groups: Sequence[Group], file: TextIO) -> None:
    for group in groups:
        for completion, scores in zip(group.completions, group.scores_GR, strict=True):
            row = {
                "row": group.draw.prompt.row,
                "prompt": group.draw.prompt.content,
                "completion": completion.transcript,
                "finish_reason": completion.finish_reason,
                "rewards": [score.value for score in scores],
                "problems": [score.problem for score in scores if score.problem],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    sys.exit(run_alone("ycore.evaluation.evaluator", _evaluate))
