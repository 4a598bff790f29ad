"""Run a pipeline: the stages of a YAML file, one after another, each in a run folder of its own.

    model: smollm2-135m                 the first stage starts from it
    stages:
      sft:                              a stage named like its command needs no `command`
        dataset: chats.jsonl
      pairs: {dataset: prompts.jsonl, rewards: [exact_answer]}
      dpo: {dataset: "${pairs.dataset}"}

How far a stage has come is read from its run folder alone. So a kill at any moment loses no more than it would of a
single run: finished stages are skipped, and the one that had begun resumes from its own checkpoint.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import combinations, groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, field_validator

from ycore.api.evaluations import run_evaluations
from ycore.api.run_settings import complete_config
from ycore.api.running import checked_plan, run_training, training_plan
from ycore.api.tables import Rows, plan_rows
from ycore.config.algorithms import ALGORITHMS, Algorithm, find_algorithm
from ycore.config.resolve import keys_in, parse_set, resolve, set_key, validated
from ycore.config.schema import PLAIN_SAMPLING, AnyConfig, RunConfig, Strict, Whole
from ycore.data.rows import TEMPLATE_COLUMNS
from ycore.errors import (
    ConfigError,
    Interrupted,
    RunError,
    RunFolderError,
    UserError,
    YcoreError,
    nearest,
)
from ycore.run.claim import AS_IT_WAS, Claim, is_finished
from ycore.run.files import (
    LOCK,
    RunFolder,
    make_private,
    read_json,
    tracker_group,
    write_bytes_atomic,
    write_json_atomic,
)
from ycore.run.text import Say
from ycore.scoring.group_rewards import rewards_differ, weighted_sum
from ycore.types import JsonObject, Record

PAIRS = "pairs"
"""The stage kind that is no command: completions are sampled and scored, and preference pairs are made of them."""

PAIRS_FILE = "pairs.jsonl"
COMMANDS = (*ALGORITHMS, "eval", PAIRS)

_SHOWN = ("images", *TEMPLATE_COLUMNS)
"""Columns that the model got beside the turns of a prompt."""

Compare = Literal["best-worst", "all"]
"""Completions that a `pairs` stage pairs: the best with the worst of a prompt, or every two whose rewards differ."""

_SEEDS_APART = 1000  # between the seeds of a stage in two runs of its pipeline


class PipelineFile(Strict):
    """The keys of a pipeline's file; `defaults` are for every stage whose command has them."""

    description: str = ""
    model: str | None = None
    output: str | None = None
    seed: Whole = 0
    defaults: JsonObject = Field(default_factory=dict)
    stages: Annotated[dict[str, JsonObject | None], Field(min_length=1)]

    @field_validator("defaults")
    @classmethod
    def _flatten(cls, defaults: JsonObject) -> JsonObject:
        """Put TRL's fields beside the other keys."""
        fields = defaults.get("trl")
        if not isinstance(fields, dict):
            return defaults
        others = {key: value for key, value in defaults.items() if key != "trl"}
        return others | fields


class Stage(NamedTuple):
    """One run of a pipeline, references replaced.

    `check_keys` have for a policy that an earlier stage trains the model that it starts from; they are None where the
    stage takes something else of an earlier one.
    """

    name: str
    command: str
    folder: Path
    keys: Record
    check_keys: Record | None
    compare: Compare

    @property
    def state(self) -> Literal["to do", "begun", "finished"]:
        """A run that was killed before it wrote its run.json is still to do."""
        folder = RunFolder(self.folder)
        if not folder.config.is_file():
            return "to do"
        return "finished" if is_finished(folder) else "begun"


class Pipeline(NamedTuple):
    """Stages in the order in which they run. `declared` is stored: only the same pipeline may resume in the folder."""

    folder: Path
    declared: Record
    stages: Sequence[Stage]


def parse_pipeline(
    recipe: Record, *, name: str, sets: Sequence[str] = (), options: Record | None = None
) -> Pipeline:
    """Parse the keys of a pipeline's file, with options and `--set` applied; ConfigError for what cannot work.

    Args:
        name: names the pipeline's folder where neither the file nor the options do.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}
    declared = deepcopy({**recipe, **given})
    for item in sets:
        _apply_set(declared, item)
    file = validated(PipelineFile, declared, what="a pipeline", error=ConfigError)
    folder = Path(file.output or f"runs/{name}").expanduser()
    paths = {} if file.model is None else {"model": file.model}
    # The first model for every policy, and nothing else that is to come.
    stand_ins = dict(paths)
    stages = []
    for stage_name, stage_keys in file.stages.items():
        stage = _parse_stage(
            stage_name, stage_keys or {}, file, folder / stage_name, paths, stand_ins
        )
        stages.append(stage)
        paths[f"{stage_name}.output"] = str(stage.folder)
        if stage.command == PAIRS:
            paths[f"{stage_name}.dataset"] = str(stage.folder / PAIRS_FILE)
        elif stage.command in ALGORITHMS:
            model = str(RunFolder(stage.folder).model)
            paths[f"{stage_name}.model"] = model
            if not ALGORITHMS[stage.command].trains_reward_model:
                first_model = stand_ins.get("model", model)
                if stage.check_keys is not None:
                    first_model = stage.check_keys["model"]
                paths["model"] = model
                stand_ins[f"{stage_name}.model"] = stand_ins["model"] = first_model
    _check_defaults(file.defaults, stages)
    return Pipeline(folder, declared, stages)


def _check_defaults(defaults: Record, stages: Iterable[Stage]) -> None:
    """Raise ConfigError for a default that no stage takes."""
    known = set[str]().union(*(_keys_of(stage.command) for stage in stages))
    for key in sorted(defaults.keys() - known):
        way_out = nearest(key, known) or "; take it out"
        raise ConfigError(f"defaults: no stage has the key {key}{way_out}")


def _keys_of(command: str) -> set[str]:
    """Return the keys and TRL's fields of a stage; of TRL's, an evaluation takes those of sampling."""
    entry = _entry_of(command)
    fields = set(entry.trl_fields)
    if entry.name == "eval":
        fields = {*PLAIN_SAMPLING, "chat_template_kwargs"}
    return {*entry.config.model_fields, *fields} - {"trl"}


def _entry_of(command: str) -> Algorithm:
    return find_algorithm("eval" if command == PAIRS else command)


def _apply_set(declared: JsonObject, item: str) -> None:
    path, value = parse_set(item)
    stages = declared.get("stages")
    names = stages if isinstance(stages, dict) else {}
    if path[0] in names and len(path) > 1:
        names[path[0]] = names[path[0]] or {}
        path = ["stages", *path]
    elif path[0] not in PipelineFile.model_fields:
        way_out = nearest(path[0], names) or f"; the stages are {', '.join(names)}"
        raise ConfigError(
            f"--set {item}: say STAGE.KEY=VALUE, with a stage of the file{way_out}"
        )
    set_key(declared, path, value)


def _parse_stage(
    name: str,
    declared: Record,
    file: PipelineFile,
    folder: Path,
    paths: Mapping[str, str],
    stand_ins: Mapping[str, str],
) -> Stage:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"stage {name!r}: a name is letters, digits, - and _; it becomes a folder's"
        )
    command = str(declared.get("command", name))
    if command not in COMMANDS:
        way_out = nearest(command, COMMANDS) or f"; e.g. {name}: {{command: sft, ...}}"
        raise ConfigError(
            f"stage {name}: its command is one of {', '.join(COMMANDS)}; it is {command!r}{way_out}"
        )
    for key in ("output", "algorithm", "recipe", "resume"):
        if key in declared:
            raise ConfigError(f"stage {name}: {key} is the pipeline's own; take it out")
    compare: Any = declared.get("compare", "best-worst")
    if compare not in get_args(Compare):
        raise ConfigError(
            f"stage {name}: compare is {' or '.join(get_args(Compare))}; it is {compare!r}"
        )
    fields = _keys_of(command)
    entry = _entry_of(command)
    stage_keys = keys_in(declared, entry)
    keys: JsonObject = {"model": "${model}"}
    keys |= {
        key: value
        for key, value in file.defaults.items()
        if key in fields and not keys_in({key: value}, entry) & stage_keys
    }
    keys |= {key: value for key, value in declared.items() if key not in ("command", "compare")}
    if file.seed:
        keys["seed"] = keys.get("seed", 0) + file.seed * _SEEDS_APART
    try:
        filled = _filled(keys, paths)
    except KeyError as missing:
        reference = missing.args[0]
        way_out = (
            nearest(reference, paths) or f"; by then there are {', '.join(paths) or 'none'}"
        )
        raise ConfigError(
            f"stage {name}: ${{{reference}}} is nothing that an earlier stage makes{way_out}"
        ) from None
    check_keys = None
    with suppress(KeyError):
        check_keys = _filled(keys, stand_ins)
    return Stage(name, command, folder, filled, check_keys, compare)


def _filled(keys: Record, paths: Mapping[str, str]) -> JsonObject:
    """Replace the references; KeyError for one that leads nowhere."""

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str):
            return re.sub(r"\$\{([^}]*)\}", lambda match: paths[match[1].strip()], value)
        return value

    filled: JsonObject = fill(keys)
    return filled


def run_pipeline(pipeline: Pipeline, *, resume: bool, dry_run: bool, say: Say) -> JsonObject:
    """Check every stage, then run what is not finished; return the report, which is also in pipeline.json."""
    _check_folder(pipeline, resume=resume)
    for stage in pipeline.stages:
        say(f"stage {stage.name} ({stage.command})")
        for name, text in _checked_rows(stage):
            say(f"  {name:<8}  {text}".rstrip())
    if dry_run:
        stages = [{"name": stage.name, "command": stage.command} for stage in pipeline.stages]
        return {"stages": stages}
    make_private(pipeline.folder)
    folder_claim = Claim(RunFolder(pipeline.folder))
    name = ""
    try:
        for stage in pipeline.stages:
            _write_report(pipeline, "running")
            has_pairs = stage.command != PAIRS or (stage.folder / PAIRS_FILE).is_file()
            if stage.state == "finished" and has_pairs:
                continue
            name = stage.name
            say(f"running stage {name}")
            with tracker_group(pipeline.folder.resolve().name):
                stop_asked = _run_stage(stage)
            if stop_asked and stage is not pipeline.stages[-1]:
                raise KeyboardInterrupt  # Ctrl-C while the stage was ending stops the pipeline too
        return _write_report(pipeline, "finished")
    except (Interrupted, KeyboardInterrupt) as error:
        stopped = f"stopped in {name}; the same command goes on with --resume"
        _write_report(pipeline, "interrupted", error=stopped)
        raise Interrupted(stopped) from error
    except YcoreError as error:
        _write_report(pipeline, "failed", error=str(error))
        raise
    finally:
        folder_claim.release()


def _check_folder(pipeline: Pipeline, *, resume: bool) -> None:
    """RunFolderError unless the folder is new or empty, or with `resume` holds this pipeline."""
    root = pipeline.folder
    file = root / "pipeline.json"
    if resume:
        if not file.is_file():
            raise RunFolderError(
                f"--resume needs the folder of a pipeline, and {root} holds none; leave it out"
            )
        if read_json(file).get("pipeline") != pipeline.declared:
            raise RunFolderError(
                f"{root} holds another pipeline; choose another --output, or give the file as it was"
            )
    elif root.exists() and (
        not root.is_dir() or {path.name for path in root.iterdir()} - {LOCK}
    ):
        raise RunFolderError(
            f"--output must be new or empty, and {root} is not; choose another --output, or go on with --resume"
        )


def _checked_rows(stage: Stage) -> Rows:
    """Return the rows of the stage's plan; UserError where it cannot work.

    A stage that takes a dataset or a reward model of an earlier one is only parsed: the rest is checked when it runs.
    """
    stage_config(stage, stage.keys)
    if stage.state == "finished":
        return [("finished", "already")]
    keys = stage.keys if stage.state == "begun" else stage.check_keys
    if keys is None:
        return [("later", "it takes what an earlier stage makes, and is checked in full then")]
    config = stage_config(stage, keys)
    if stage.state == "begun" and config.algorithm == "eval":
        return [("begun", "it has no checkpoint, and starts again")]
    with _named(stage):
        return stage_plan(config, resume=stage.state == "begun")


def stage_config(stage: Stage, keys: Record) -> AnyConfig:
    """Resolve the config of a stage's run, by the rules of its command's recipes."""
    algorithm = "eval" if stage.command == PAIRS else stage.command
    with _named(stage):
        config = resolve(
            recipe=keys, options={"algorithm": algorithm, "output": str(stage.folder)}
        )
        if stage.command == PAIRS and isinstance(config, RunConfig) and config.has_turns:
            raise ConfigError(
                "a pair's answers are single turns; leave tools, env and agent out, or take grpo with them"
            )
        return config


def stage_plan(config: AnyConfig, *, resume: bool) -> Rows:
    """Check a stage's run, and return the rows of its plan."""
    options = AS_IT_WAS if resume else None
    return plan_rows(checked_plan(complete_config(config), resume=options), resume=resume)


def run_stage_command(config: AnyConfig, *, resume: bool) -> Record:
    """Check a stage's run, do it in the foreground, and return its summary."""
    config = complete_config(config)
    options = AS_IT_WAS if resume else None
    if config.algorithm == "eval":
        assert isinstance(config, RunConfig)
        checked_plan(config, resume=options)
        return run_evaluations([config])[config.model]
    plan = training_plan(config, resume=options)
    return run_training(config, plan, resume=options)


@contextmanager
def _named(stage: Stage) -> Iterator[None]:
    """Put the stage's name before the message of an error raised inside."""
    try:
        yield
    except (UserError, RunError) as error:
        raise type(error)(f"stage {stage.name}: {error}") from error


def _run_stage(stage: Stage) -> bool:
    """Run the stage, or the rest of it; return whether Ctrl-C came too late to stop it."""
    config = stage_config(stage, stage.keys)
    stop_asked = False
    if stage.state != "finished":
        if stage.state == "begun" and config.algorithm == "eval":
            _clear(stage.folder)  # it has no checkpoint, and starts again
        with _named(stage):
            summary = run_stage_command(config, resume=stage.state == "begun")
        stop_asked = summary.get("stop_asked", False)
    if stage.command == PAIRS:
        assert isinstance(config, RunConfig)
        num_pairs = write_pairs(
            stage.folder, weights=config.reward_weights, compare=stage.compare
        )
        file = RunFolder(stage.folder).summary
        write_json_atomic(file, read_json(file) | {"num_pairs": num_pairs})
    return stop_asked


def _clear(root: Path) -> None:
    """Remove a run folder, once a killed run's processes are gone."""
    folder_claim = Claim(RunFolder(root))
    try:
        shutil.rmtree(root)
    finally:
        folder_claim.release()


def _write_report(pipeline: Pipeline, status: str, *, error: str | None = None) -> JsonObject:
    report: JsonObject = {"status": status}
    if error is not None:
        report["error"] = error
    report["stages"] = [_stage_report(stage) for stage in pipeline.stages]
    report["pipeline"] = pipeline.declared
    write_json_atomic(pipeline.folder / "pipeline.json", report)
    return report


def _stage_report(stage: Stage) -> JsonObject:
    file = RunFolder(stage.folder).summary
    figures = read_json(file) if file.is_file() else {}
    return {
        "name": stage.name,
        "command": stage.command,
        "status": figures.pop("status", "to do" if stage.state == "to do" else "begun"),
        "output": str(stage.folder),
        "figures": figures,
    }


def report_rows(report: Record) -> Rows:
    """List for each stage its name; its command, how it ended, and its main figures."""
    rows = []
    for stage in report["stages"]:
        figures = [f"{stage['command']}: {stage['status']}", *_main_figures(stage["figures"])]
        rows.append((stage["name"], ", ".join(figures)))
    return rows


def _main_figures(figures: Record) -> Iterator[str]:
    if "wall_s" in figures:
        yield f"{figures['wall_s']:.0f} s"
    if "num_pairs" in figures:
        yield f"{figures['num_pairs']} pairs"
    held_out = (figures.get("held_out") or {}).get("after") or {}
    for name, value in {**figures, **held_out}.items():
        if (
            name in ("reward_first", "reward_last", "reward", "pass@1", "accuracy")
            and value is not None
        ):
            yield f"{name} {value:.3f}"


# Preference pairs from scored completions. Best against worst, as in iterative DPO (RLHF Workflow, arXiv 2405.07863);
# every comparison of a prompt's answers, as for InstructGPT's reward model (arXiv 2203.02155, section 3.4).
# A prompt whose completions all have the same reward teaches nothing and is left out.


def write_pairs(folder: Path, *, weights: Sequence[float], compare: Compare) -> int:
    """Write the pairs of an evaluation's completions as JSONL; their number, and RunError where there is none."""
    with (folder / "completions.jsonl").open(encoding="utf-8") as lines:
        pairs = list(make_pairs(map(json.loads, lines), weights, compare=compare))
    if not pairs:
        raise RunError(
            "no prompt has two completions with different rewards, so there is no pair; "
            "raise num_samples or trl.temperature, or take a reward that tells them apart"
        )
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    write_bytes_atomic(folder / PAIRS_FILE, text.encode())
    return len(pairs)


def make_pairs(
    rows: Iterable[Record], weights: Sequence[float], *, compare: Compare
) -> Iterator[JsonObject]:
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
        if compare == "best-worst":
            best_first = best_first[:1] + best_first[-1:]
        seen = set()
        for (best, chosen), (worst, rejected) in combinations(best_first, 2):
            answers: list[Any] = [chosen["completion"], rejected["completion"]]
            texts = frozenset(answers)
            if len(texts) < 2 or texts in seen or not rewards_differ([best, worst]):
                continue
            seen.add(texts)
            if not isinstance(chosen["prompt"], str):  # a chat is answered by a turn
                answers = [[{"role": "assistant", "content": text}] for text in answers]
            pair = {"prompt": chosen["prompt"], "chosen": answers[0], "rejected": answers[1]}
            shown = {name: chosen[name] for name in _SHOWN if name in chosen}
            yield pair | shown | {"chosen_reward": best, "rejected_reward": worst}
