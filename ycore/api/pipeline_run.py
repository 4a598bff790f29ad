"""Runs a pipeline's steps one after another, each in its own folder, and writes pipeline.json.

How far a step has come is read from its run folder alone. So a kill at any moment loses no more than it would of a
single run: finished steps are skipped, and the one that had begun resumes from its own checkpoint.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, Literal

from ycore.api.run_settings import complete_config
from ycore.api.running import checked_plan, run_training, training_plan
from ycore.api.stages import (
    PAIRS,
    PAIRS_FILE,
    Compare,
    Pipeline,
    StageRun,
    map_texts,
    steps_of,
    with_sets,
)
from ycore.api.tables import plan_rows
from ycore.config.algorithms import find_algorithm
from ycore.config.resolve import parse_set, resolve
from ycore.config.schema import AnyConfig, RunConfig
from ycore.errors import Interrupted, RunError, RunFolderError, UserError, YcoreError
from ycore.launch.launcher import EVALUATOR, run_worker
from ycore.run.claim import AS_IT_WAS, Claim, is_finished
from ycore.run.files import make_private, read_json, write_bytes_atomic, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.run.reports import tracker_group
from ycore.run.text import Say
from ycore.scoring.group_rewards import rewards_differ, weighted_sum

# Functions of a config and whether to resume: a check starts nothing and returns the rows of the plan; a run, in the
# foreground and with its checks, returns the summary.
Check = Callable[[AnyConfig, bool], list[tuple[str, str]]]
Run = Callable[[AnyConfig, bool], Mapping[str, Any]]
State = Literal["to do", "begun", "finished"]
Status = Literal["running", "finished", "interrupted", "failed"]


def check_pipeline(
    pipeline: Pipeline, steps: Sequence[StageRun], check: Check, *, show: Say
) -> None:
    """Check every step and show its plan, before any of them begins.

    UserError where a step cannot work. One that takes a dataset or reward model of an earlier step is only parsed: the
    rest is checked when it runs.
    """
    for number, step in enumerate(steps, start=1):
        show(_title(step, number, steps))
        step_config(step, pipeline)
        if state_of(step) == "finished":
            show("  finished already")
            continue
        ready = with_stand_ins(step)
        if ready is None:
            made = [
                path
                for path, model in step.stand_ins.items()
                if model is None and not Path(path).exists()
            ]
            show(
                f"  takes {', '.join(made)} from an earlier stage; checked in full when that is there"
            )
            continue
        with _named(step):
            for name, text in check(step_config(ready, pipeline), state_of(step) == "begun"):
                show(f"  {name:<8}  {text}".rstrip())


def run_pipeline(
    pipeline: Pipeline,
    steps: Sequence[StageRun],
    run: Run,
    *,
    declared: Mapping[str, Any],
    resume: bool,
    say: Say,
) -> dict[str, Any]:
    """Run what is not finished, and return the report, which is also in pipeline.json however the pipeline ends.

    Args:
        declared: the pipeline's keys, stored in pipeline.json: only the same pipeline may resume there.
        resume: whether the folder must already hold this pipeline.
    """
    root = Path(pipeline.output)
    check_folder(root, declared, resume=resume)
    make_private(root)
    folder_claim = Claim(RunFolder(root))
    write_report = partial(_write_report, root, declared, steps)
    try:
        write_report("running")
        for number, step in enumerate(steps, start=1):
            has_pairs = step.command != PAIRS or (step.folder / PAIRS_FILE).is_file()
            if state_of(step) == "finished" and has_pairs:
                say(f"{_title(step, number, steps)}: finished already")
                continue
            say(_title(step, number, steps))
            with tracker_group(root.resolve().name):
                stop_asked = _run_step(step, pipeline, run)
            write_report("running")
            if stop_asked and step is not steps[-1]:
                raise KeyboardInterrupt  # Ctrl-C while the stage was ending stops the pipeline too
        return write_report("finished")
    except (Interrupted, KeyboardInterrupt) as error:
        stopped = f"stopped in {step.name}; the same command goes on with --resume"
        write_report("interrupted", error=stopped)
        raise Interrupted(stopped) from error
    except YcoreError as error:
        write_report("failed", error=str(error))
        raise
    finally:
        folder_claim.release()


def check_folder(root: Path, declared: Mapping[str, Any], *, resume: bool) -> None:
    """RunFolderError unless the folder is new, empty, or holds this pipeline unfinished and `resume` is set."""
    file = root / "pipeline.json"
    if not file.is_file():
        if resume:
            raise RunFolderError(
                f"--resume needs the folder of a pipeline, and {root} holds none; leave it out"
            )
        if root.exists() and (
            not root.is_dir() or any(path.name != ".lock" for path in root.iterdir())
        ):
            raise RunFolderError(
                f"--output must be new or empty, and {root} is not; choose another --output"
            )
        return
    stored = read_json(file)
    if stored.get("pipeline") != dict(declared):
        raise RunFolderError(
            f"{root} holds another pipeline; choose another --output, or give the file as it was"
        )
    if stored["status"] == "finished":
        raise RunFolderError(
            f"{root} holds this pipeline, finished; choose another --output to run it again"
        )
    if not resume:
        raise RunFolderError(
            f"{root} holds this pipeline, not finished; go on with --resume, or choose another --output"
        )


def step_config(step: StageRun, pipeline: Pipeline) -> AnyConfig:
    """Resolve the config of a step's run, by the rules of its command's recipes."""
    algorithm = "eval" if step.command == PAIRS else step.command
    fields = find_algorithm(algorithm).config.model_fields
    recipe = {key: value for key, value in pipeline.defaults.items() if key in fields} | dict(
        step.keys
    )
    with _named(step):
        return resolve(
            recipe=recipe, options={"algorithm": algorithm, "output": str(step.folder)}
        )


def with_stand_ins(step: StageRun) -> StageRun | None:
    """Replace every missing model by the one it will be trained from; None where there is none."""
    missing = {path: model for path, model in step.stand_ins.items() if not Path(path).exists()}
    if None in missing.values():
        return None
    return replace(step, keys=map_texts(step.keys, lambda text: missing.get(text, text)))


def state_of(step: StageRun) -> State:
    """`begun` has a run.json but did not finish; a run that was killed before it wrote one is still to do."""
    folder = RunFolder(step.folder)
    if not folder.config.is_file():
        return "to do"
    return "finished" if is_finished(folder) else "begun"


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List for each stage its name; its command, how it ended, its seconds and its main figure."""
    rows = []
    for stage in report["stages"]:
        seconds = "" if stage["wall_s"] is None else f"{stage['wall_s']:.0f} s"
        parts = (f"{stage['command']}: {stage['status']}", seconds, headline(stage["figures"]))
        rows.append((stage["name"], ", ".join(filter(None, parts))))
    return rows


def headline(figures: Mapping[str, Any]) -> str:
    """Choose the main figure of a summary, before and after where both are known; held-out rows come first."""
    held_out = figures.get("held_out") or {}
    before, after = held_out.get("before") or {}, held_out.get("after") or {}
    for name, first, last in (
        ("held-out accuracy", before.get("accuracy"), after.get("accuracy")),
        ("reward", figures.get("reward_first"), figures.get("reward_last")),
        ("held-out loss", before.get("loss"), after.get("loss")),
        ("loss", figures.get("loss_first"), figures.get("loss_last")),
    ):
        if isinstance(first, int | float) and isinstance(last, int | float):
            return f"{name} {first:.3f} -> {last:.3f}"
    num_pairs = figures.get("num_pairs")
    parts = [] if num_pairs is None else [f"{num_pairs} pairs"]
    parts += [
        f"{name} {figures[name]:.3f}"
        for name in ("reward", "pass@1")
        if isinstance(figures.get(name), int | float)
    ]
    return ", ".join(parts)


def _title(step: StageRun, number: int, steps: Sequence[StageRun]) -> str:
    return f"stage {number} of {len(steps)}: {step.name} ({step.command})"


@contextmanager
def _named(step: StageRun) -> Iterator[None]:
    """Put the stage's name before the message of an error raised inside."""
    try:
        yield
    except (UserError, RunError) as error:
        raise type(error)(f"stage {step.name}: {error}") from error


def _run_step(step: StageRun, pipeline: Pipeline, run: Run) -> bool:
    """Run the step, or the rest of it; whether Ctrl-C came too late to stop it."""
    config, stop_asked = step_config(step, pipeline), False
    if state_of(step) != "finished":
        with _named(step):
            stop_asked = bool(run(config, _can_resume(step)).get("stop_asked"))
    if step.command == PAIRS:
        assert isinstance(config, RunConfig)
        weights = [reward.weight for reward in config.rewards]
        num_pairs = write_pairs(
            step.folder, weights=weights, compare=step.compare, to=step.folder / PAIRS_FILE
        )
        summary = RunFolder(step.folder).summary
        write_json_atomic(summary, {**read_json(summary), "num_pairs": num_pairs})
    return stop_asked


def _can_resume(step: StageRun) -> bool:
    """Say whether the step has a run to resume. A stopped measurement has no checkpoint: its folder is cleared."""
    if state_of(step) != "begun":
        return False
    if step.command not in ("eval", PAIRS):
        return True
    folder_claim = Claim(
        RunFolder(step.folder)
    )  # waits until the killed run's processes are gone
    try:
        shutil.rmtree(step.folder)
    finally:
        folder_claim.release()
    return False


def _write_report(
    root: Path,
    declared: Mapping[str, Any],
    steps: Sequence[StageRun],
    status: Status,
    *,
    error: str | None = None,
) -> dict[str, Any]:
    stages = [_stage_report(step) for step in steps]
    seconds = sum(stage["wall_s"] or 0.0 for stage in stages)
    report: dict[str, Any] = {"status": status, "wall_s": round(seconds, 1), "stages": stages}
    report |= ({} if error is None else {"error": error}) | {"pipeline": dict(declared)}
    write_json_atomic(root / "pipeline.json", report)
    return report


def _stage_report(step: StageRun) -> dict[str, Any]:
    summary_file = RunFolder(step.folder).summary
    summary = read_json(summary_file) if summary_file.is_file() else {}
    return {
        "name": step.name,
        "command": step.command,
        "status": summary.get("status", "to do" if state_of(step) == "to do" else "begun"),
        "wall_s": summary.get("wall_s"),
        "figures": {
            key: value
            for key, value in summary.items()
            if key not in ("status", "wall_s", "error")
        },
        "makes": step.makes,
    }


# Preference pairs from scored completions. Best against worst, as in iterative DPO (RLHF Workflow, arXiv 2405.07863);
# every comparison of a prompt's answers, as for InstructGPT's reward model (arXiv 2203.02155, section 3.4).
# A prompt whose completions all have the same reward teaches nothing and is left out.


def write_pairs(folder: Path, *, weights: Sequence[float], compare: Compare, to: Path) -> int:
    """Write the pairs of an evaluation's completions as JSONL; their number, and RunError where there is none."""
    with (folder / "completions.jsonl").open(encoding="utf-8") as lines:
        pairs = list(make_pairs(map(json.loads, lines), weights, compare=compare))
    if not pairs:
        raise RunError(
            "no prompt has two completions with different rewards, so there is no pair; "
            "raise num_samples or trl.temperature, or take a reward that tells them apart"
        )
    write_bytes_atomic(
        to, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs).encode()
    )
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
            total = weighted_sum(row["rewards"], weights)
            if total is not None:
                scored.append((total, row))
        best_first = sorted(scored, key=lambda pair: -pair[0])
        ends = [(best_first[0], best_first[-1])] if best_first else []
        seen: set[tuple[str, str]] = set()
        for (best, chosen), (worst, rejected) in (
            combinations(best_first, 2) if compare == "all" else ends
        ):
            texts = (chosen["completion"], rejected["completion"])
            if not rewards_differ([best, worst]) or texts in seen:
                continue
            seen.add(texts)
            answers: list[Any] = list(texts)
            if not isinstance(chosen["prompt"], str):  # a chat is answered by a turn
                answers = [[{"role": "assistant", "content": text}] for text in texts]
            pair = {"prompt": chosen["prompt"], "chosen": answers[0], "rejected": answers[1]}
            yield pair | {"chosen_reward": best, "rejected_reward": worst}


def declared_stages(
    recipe: Mapping[str, Any], sets: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply `--set`, and the options that were given, to a pipeline's keys."""
    values = {".".join(path): value for path, value in map(parse_set, sets)}
    values |= {key: value for key, value in options.items() if value is not None}
    return with_sets(recipe, values)


def run_declared(
    pipeline: Pipeline, declared: Mapping[str, Any], *, resume: bool, dry_run: bool, say: Say
) -> dict[str, Any]:
    """Check a pipeline and run it, or the rest of it; return its report."""
    steps = steps_of(pipeline)
    check_folder(Path(pipeline.output), declared, resume=resume)
    check_pipeline(pipeline, steps, _check_stage, show=say)
    if dry_run:
        return {"stages": [{"name": step.name, "command": step.command} for step in steps]}
    return run_pipeline(pipeline, steps, _run_stage, declared=declared, resume=resume, say=say)


def _check_stage(config: AnyConfig, resume: bool) -> list[tuple[str, str]]:
    return plan_rows(checked_plan(complete_config(config), resume=resume), resume=resume)


def _run_stage(config: AnyConfig, resume: bool) -> Mapping[str, Any]:
    config = complete_config(config)
    if config.algorithm == "eval":
        checked_plan(config, resume=resume)
        return run_worker(EVALUATOR, config)
    plan = training_plan(config, resume=resume, how=AS_IT_WAS)
    return run_training(config, plan, resume=resume, how=AS_IT_WAS)
