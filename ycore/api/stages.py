"""Parse the file of a pipeline, and put its runs in order.

    model: smollm2-135m                 the first stage starts from it
    stages:
      sft:                              a stage named like its command needs no `command`
        dataset: chats.jsonl
      rounds:
        repeat: 3                       a loop: its stages, three times
        stages:
          pairs: {dataset: prompts.jsonl, rewards: [exact_answer]}
          dpo: {dataset: "${pairs.dataset}"}

Loops are unrolled as the file is parsed. `steps_of` gives every run a folder and replaces references by paths.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ycore.config.algorithms import ALGORITHMS
from ycore.config.resolve import set_key
from ycore.errors import ConfigError, nearest
from ycore.run.paths import RunFolder

PAIRS = "pairs"
"""The stage kind that is no command: completions are sampled and scored, and preference pairs are made of them."""

PAIRS_FILE = "pairs.jsonl"
COMMANDS: tuple[str, ...] = (*ALGORITHMS, "eval", PAIRS)
TRAINS_A_POLICY = frozenset(
    row.name for row in ALGORITHMS.values() if not row.trains_reward_model
)

Compare = Literal["best-worst", "all"]
"""Completions that a `pairs` stage pairs: the best with the worst of a prompt, or every two whose rewards differ."""

_TOP = ("description", "model", "output", "seed", "defaults", "stages")
_SEEDS_APART = 1000  # of a stage that names a seed, between two runs of its pipeline


@dataclass(frozen=True, slots=True)
class Stage:
    """One command; `keys` are those of its recipe, references still in them."""

    name: str
    command: str
    keys: Mapping[str, Any]
    compare: Compare = "best-worst"
    round: int | None = None  # of a stage in a loop, counted from 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in the order in which they run; `defaults` are keys for every stage whose command knows them.

    `seed` tells runs of one pipeline apart: with 0 every stage has the seed that it names.
    """

    model: str | None
    output: str
    seed: int
    defaults: Mapping[str, Any]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class StageRun:
    """One run of one stage, references replaced.

    `stand_ins`: of every path in `keys` that an earlier step makes, the model to check in its place, or None.
    """

    name: str
    command: str
    keys: Mapping[str, Any]
    folder: Path
    stand_ins: Mapping[str, str | None] = field(default_factory=dict)
    compare: Compare = "best-worst"

    @property
    def makes(self) -> dict[str, str]:
        """The paths that later stages can refer to, by kind: `output`, and `model` or `dataset`."""
        made = {"output": str(self.folder)}
        if self.command == PAIRS:
            made["dataset"] = str(self.folder / PAIRS_FILE)
        elif self.command in ALGORITHMS:
            made["model"] = str(RunFolder(self.folder).model)
        return made


def parse_pipeline(declared: Mapping[str, Any], *, name: str) -> Pipeline:
    """Parse the keys of a pipeline's file, with `--set` applied; `name` is that of its folder, where it names none."""
    _check_keys(declared, _TOP, "a pipeline")
    entries = [
        _parse_entry(str(key), value)
        for key, value in _mapping(declared.get("stages"), "stages").items()
    ]
    if not entries:
        raise ConfigError("a pipeline needs stages; e.g. stages: {sft: {dataset: chats.jsonl}}")
    names = Counter(
        stage_name for stages in entries for stage_name in {stage.name for stage in stages}
    )
    for stage_name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"stage {stage_name}: there are two of this name; references would not know which"
            )
    return Pipeline(
        model=None if declared.get("model") is None else str(declared["model"]),
        output=str(declared.get("output") or f"runs/{name}"),
        seed=_seed(declared.get("seed", 0)),
        defaults=_mapping(declared.get("defaults") or {}, "defaults"),
        stages=tuple(stage for stages in entries for stage in stages),
    )


def _seed(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"seed must be a whole number of 0 or more, and it is {value!r}")
    return value


def with_sets(declared: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """Copy with `--set` applied, values by dotted path; `sft.steps=5` finds its stage inside loops too."""
    merged = deepcopy(dict(declared))
    stages = merged["stages"] = _mapping(merged.get("stages"), "stages")
    loops = [
        entry["stages"]
        for entry in stages.values()
        if isinstance(entry, Mapping) and "stages" in entry
    ]
    holders = {name: inner for inner in (*loops, stages) for name in inner}
    for key, value in sets.items():
        first, dot, rest = key.partition(".")
        holder = merged if first == "defaults" else holders.get(first)
        if not dot and first in _TOP:
            merged[first] = value
        elif rest and holder is not None:
            holder[first] = holder.get(first) or {}
            set_key(holder, key.split("."), value)
        else:
            way_out = nearest(first, holders) or f"; the stages are {', '.join(holders)}"
            raise ConfigError(
                f"--set {key}: say STAGE.KEY=VALUE, with a stage of the file{way_out}"
            )
    return merged


def steps_of(pipeline: Pipeline) -> list[StageRun]:
    """List every run, in order; ConfigError for a stage without a model, or that needs what no earlier stage makes."""
    expansion = _Expansion(pipeline)
    return [expansion.step(stage) for stage in pipeline.stages]


class _Expansion:
    """The state of going through the stages: the latest run of each, and the newest policy."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._output = Path(pipeline.output)
        self._policy = pipeline.model
        self._seed_offset = pipeline.seed * _SEEDS_APART
        self._default_seed = pipeline.defaults.get("seed", 0)
        self._latest: dict[str, StageRun] = {}
        self._stand_ins: dict[str, str | None] = {}
        self._used: set[str] = set()

    def step(self, stage: Stage) -> StageRun:
        self._used = set()
        keys = map_texts(stage.keys, lambda text: self._replace(text, stage))
        if "model" not in keys:
            if self._policy is None:
                raise ConfigError(
                    f"stage {stage.name}: it has no model, and no stage before it makes one; say model:"
                )
            keys["model"] = self._policy
            self._used.add(self._policy)
        seed = keys.get("seed", self._default_seed)
        if self._seed_offset and isinstance(seed, int):  # another type is refused with the keys
            keys["seed"] = seed + self._seed_offset
        name = stage.name if stage.round is None else f"{stage.name}-{stage.round}"
        stand_ins = {
            path: self._stand_ins[path]
            for path in sorted(self._used)
            if path in self._stand_ins
        }
        step = StageRun(
            name, stage.command, keys, self._output / name, stand_ins, stage.compare
        )
        self._latest[stage.name] = step
        model = str(keys["model"])
        for kind, path in step.makes.items():
            is_policy = kind == "model" and step.command in TRAINS_A_POLICY
            self._stand_ins[path] = self._stand_ins.get(model, model) if is_policy else None
            if is_policy:
                self._policy = path
        return step

    def _replace(self, text: str, stage: Stage) -> str | int:
        if text == "${round}" and stage.round is not None:
            return stage.round  # a number stays one
        return re.sub(
            r"\$\{([^}]*)\}", lambda match: self._resolve(match[1].strip(), stage), text
        )

    def _resolve(self, reference: str, stage: Stage) -> str:
        where = f"stage {stage.name}: ${{{reference}}}"
        if reference == "round":
            if stage.round is None:
                raise ConfigError(
                    f"{where} counts the rounds of a loop, and this stage is in none"
                )
            return str(stage.round)
        path = self._policy if reference == "model" else self._made(reference, where)
        if path is None:
            raise ConfigError(
                f"{where}: there is no model by then; say model: at the top of the file"
            )
        self._used.add(path)
        return path

    def _made(self, reference: str, where: str) -> str:
        name, _, kind = reference.partition(".")
        if name not in self._latest:
            way_out = (
                nearest(name, self._latest)
                or f"; by then there are {', '.join(self._latest) or 'no stages'}"
            )
            raise ConfigError(f"{where} names no stage that has run by then{way_out}")
        made = self._latest[name].makes
        if kind not in made:
            raise ConfigError(
                f"{where}: a {self._latest[name].command} stage makes {', '.join(made)}; say one of them"
            )
        return made[kind]


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Copy JSON values, every text in them changed."""
    if isinstance(value, Mapping):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _parse_entry(name: str, value: Any) -> list[Stage]:
    """Parse a stage, or the stages of a loop, in each of its rounds."""
    keys = _mapping({} if value is None else value, f"stage {name}")
    if "stages" not in keys:
        return [_parse_stage(name, keys)]
    _check_keys(keys, ("repeat", "stages"), f"loop {name}")
    repeat = keys.get("repeat")
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        raise ConfigError(
            f"loop {name}: repeat must be a whole number of rounds, 1 or more; it is {repeat!r}"
        )
    inner = _mapping(keys["stages"], f"loop {name}: stages")
    if not inner:
        raise ConfigError(f"loop {name}: it needs stages")
    stages = [_parse_stage(str(key), stage or {}) for key, stage in inner.items()]
    return [replace(stage, round=number) for number in range(1, repeat + 1) for stage in stages]


def _parse_stage(name: str, value: Any) -> Stage:
    keys = _mapping(value, f"stage {name}")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"stage {name!r}: a name is letters, digits, - and _; it becomes a folder's"
        )
    command = str(keys.pop("command", name))
    if command not in COMMANDS:
        way_out = nearest(command, COMMANDS) or f"; e.g. {name}: {{command: sft, ...}}"
        raise ConfigError(
            f"stage {name}: its command is one of {', '.join(COMMANDS)}; it is {command!r}{way_out}"
        )
    for key in ("output", "algorithm", "recipe", "resume"):
        if key in keys:
            raise ConfigError(f"stage {name}: {key} is the pipeline's own; take it out")
    compare: Any = keys.pop("compare", "best-worst") if command == PAIRS else "best-worst"
    if compare not in get_args(Compare):
        raise ConfigError(
            f"stage {name}: compare is {' or '.join(get_args(Compare))}; it is {compare!r}"
        )
    return Stage(name, command, keys, compare)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of keys; it is {value!r}")
    return dict(value)


def _check_keys(declared: Mapping[str, Any], known: tuple[str, ...], owner: str) -> None:
    for key in declared:
        if key not in known:
            raise ConfigError(
                f"{owner} has no key {key}{nearest(str(key), known) or '; known are ' + ', '.join(known)}"
            )
