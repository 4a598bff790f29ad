"""At a run's end: what the plan's formulas say of it, beside what it took.

On machines without devices, where the kernel tells every process's peak; elsewhere there is nothing to compare yet.

Not here: the formulas and the comparison (`planning`), and the peaks (`peaks`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.config.batch import derive_batch
from ycore.config.run import RunConfig
from ycore.errors import YcoreError
from ycore.launch.layout import Layout
from ycore.launch.scorers import scoring_models
from ycore.launch.site import Site
from ycore.placement.placement import JUDGE
from ycore.planning import machine
from ycore.planning.compare import Ran, Row, compare
from ycore.planning.devices import Device
from ycore.planning.facts import ModelFacts, facts_of
from ycore.planning.job import Sharding
from ycore.planning.jobs import job_of
from ycore.run_folder.files import read_json


def plan_and_measured(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure: what, unit, planned, measured, error; none where nothing can be compared."""
    files = (site.folder.memory, site.folder.root / "engines.json")
    if config.algorithm != "grpo" or site.machine.devices or not metrics or not all(file.is_file() for file in files):
        return []
    try:
        rows = compared(config, site, metrics, core=machine.processor())
    except YcoreError:
        return []  # a model that cannot be planned was trained all the same
    return [row.as_json() for row in rows]


def compared(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]], *, core: Device) -> list[Row]:
    """The rows of a run that lies in the site's folder; `core` is one core of the machine that it ran on."""
    told = read_json(site.folder.root / "engines.json")
    facts = facts_of(read_json(Path(told["model"]) / "config.json"), name=config.model)
    judge, judge_tokens = _judge(config, told)
    job = job_of(config, facts, judge=judge, judge_tokens=judge_tokens)
    return compare(job, _ran(config, site, told), core, peaks=read_json(site.folder.memory), metrics=metrics)


def _judge(config: RunConfig, engines: Mapping[str, Any]) -> tuple[ModelFacts | None, int | None]:
    """The run's first judge and the tokens that it may write."""
    judges = [scorer for scorer in engines.get("scorers", []) if scorer["role"] == JUDGE]
    models = [model for model in scoring_models(config) if model.role == JUDGE]
    if not judges or not models:
        return None, None
    facts = facts_of(read_json(Path(judges[0]["model"]) / "config.json"), name=models[0].name)
    return facts, models[0].max_new_tokens


def _ran(config: RunConfig, site: Site, engines: Mapping[str, Any]) -> Ran:
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Ran(
        ranks=site.layout.local,
        sharding=sharding_of(site.layout),
        engines=len(engines["engines"]),
        at_once=engines.get("max_num_seqs") or 1,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
        num_cores=len(site.machine.cores),
    )


def sharding_of(layout: Layout) -> Sharding:
    """How an accelerate config cuts up training."""
    told = layout.accelerate or {}
    stage = (told.get("deepspeed_config") or {}).get("zero_stage")
    by_stage: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return "fsdp2" if told.get("distributed_type") == "FSDP" else by_stage.get(stage or 0, "ddp")
