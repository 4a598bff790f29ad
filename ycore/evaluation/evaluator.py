"""`python -m ycore.evaluation.evaluator RUN_FOLDER`: complete every prompt, score it as training would, write figures.

With `pairs` the completions are the rows' own, and the figures are of who scores them. It leaves `eval.json` (the
figures) and `completions.jsonl` (every completion with its rewards) in the run folder.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ycore.evaluation.held_out import (
    count_groups,
    evaluation_figures,
    mean_reward,
    pair_figures,
    write_groups,
)
from ycore.run.files import RunFolder, sync, write_json_atomic
from ycore.run.interrupt import on_stop
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import run_alone
from ycore.run.work import publish_work, working
from ycore.types import Group, Metrics

if TYPE_CHECKING:
    from ycore.round.assemble import Assembly
    from ycore.round.step import Controller

_PROMPTS_PER_ROW = 64  # of metrics.jsonl


def _evaluate(root: Path) -> None:
    publish_work(RunFolder(root).work)
    with working("loading the model"):
        from ycore.round.assemble import assemble

        parts = assemble(root)
        config = parts.config
        engines = [] if config.given_pairs else parts.engines(own_model(parts))
    controller = parts.controller(engines)
    with started(controller, parts):
        groups = _write_all(controller, len(parts.prompts.prompts), parts.folder)
        counted = controller.run(controller.add_up_meters())
    result: Metrics
    if config.given_pairs:
        result = {"num_pairs": len(groups)} | pair_figures(groups, config)
        if (bias := counted.get("ycore/judge/position_bias")) is not None:
            result["position_bias"] = bias
    else:
        result = {"num_prompts": len(groups), "num_samples": config.num_samples}
        result |= evaluation_figures(count_groups(groups, config), config)
    write_json_atomic(root / "eval.json", result)
    if config.has_trackers:
        from ycore.view.trackers import tell_evaluation

        tell_evaluation(config, parts.folder, result)


@contextmanager
def started(controller: "Controller", parts: "Assembly") -> Iterator[None]:
    """Start a controller that trains nothing, and close it on leaving."""
    on_stop(controller.stop.set)
    try:
        controller.start(timeout_s=parts.config.engine.start_timeout_s)
        parts.folder.step_began.touch()
        yield
    finally:
        controller.close()


def own_model(parts: "Assembly") -> Any | None:
    """Load the run's model as transformers does, on the device where there is one; None where servers hold it."""
    if parts.kind.has_servers:
        return None
    import torch

    from ycore.engine.sight import image_token_ids
    from ycore.models.convert import language_model_class
    from ycore.trl.build import attention_of, compute_dtype
    from ycore.trl.forward import never_write

    model = language_model_class(parts.sight is not None).from_pretrained(
        parts.started.model,
        dtype=compute_dtype(parts.config),
        trust_remote_code=parts.config.trust_remote_code,
        **attention_of(parts.started.model),
    )
    never_write(model, image_token_ids(model.config.to_dict()))
    return model.to("cuda") if torch.cuda.is_available() else model


def _write_all(controller: "Controller", num_prompts: int, folder: RunFolder) -> list[Group]:
    """Return the groups of all prompts, written to completions.jsonl in the order of the prompts."""
    completions = folder.root / "completions.jsonl"
    meter = controller.meter
    weights = controller.rules.reward_weights
    waiting: dict[int, Group] = {}
    done: list[Group] = []
    with (
        closing(MetricsWriter(folder.metrics)) as writer,
        completions.open("w", encoding="utf-8") as file,
    ):
        writer.forget_after(0)  # an evaluation that is started again takes all rows again

        def write(group: Group) -> None:
            controller.count(group)
            waiting[group.draw.position] = group
            while len(done) in waiting:
                done.append(waiting.pop(len(done)))
                _write_completions(done[-1], file)
                if len(done) % _PROMPTS_PER_ROW == 0 or len(done) == num_prompts:
                    meter.check_scored(
                        len(meter.rewards[""]), meter.num_masked, meter.problems.total()
                    )
                    writer.write({"step": len(done), "reward": mean_reward(done, weights)})

        draws = [controller.draws.draw() for _ in range(num_prompts)]
        controller.run_round(
            write_groups(controller, draws, step=0, tell=write), step=0, trains=False
        )
    for path in (folder.metrics, completions):
        sync(path)  # before anything says that the evaluation has finished
    return done


def _write_completions(group: Group, file: TextIO) -> None:
    prompt = group.draw.prompt
    shown = {
        "dataset": prompt.dataset,
        "images": [f"images/{image.sha256}" for image in prompt.images],
        "tools": prompt.tools,
        "chat_template_kwargs": prompt.template_arguments,
    }
    for completion, scores in group.scored():
        row = {
            "row": prompt.row,
            "prompt": prompt.content,
            **{name: value for name, value in shown.items() if value},
            "completion": completion.transcript,
            "finish_reason": completion.finish_reason,
            "rewards": [score.value for score in scores],
            "problems": [score.problem for score in scores if score.problem],
        }
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(run_alone(_evaluate))
