"""Every shipped pipeline is whole: its references lead somewhere, and each of its stages is a run of its command."""

import pytest

from ycore.api.pipeline_run import step_config
from ycore.api.stages import parse_pipeline, steps_of
from ycore.config.batch import derive_batch
from ycore.config.recipe_files import PIPELINE, list_recipes, load_recipe
from ycore.config.schema import RunConfig

NAMES = [entry.name for entry in list_recipes() if entry.command == PIPELINE]


def test_the_pipelines_are_found() -> None:
    assert {"rlhf-pipeline", "iterative-dpo"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_a_whole_pipeline(name: str) -> None:
    pipeline = parse_pipeline(load_recipe(name, command=PIPELINE), name=name)
    assert pipeline.output == f"runs/{name}"
    steps = steps_of(pipeline)
    for step in steps:
        config = step_config(step, pipeline)
        assert config.output == str(step.folder)
        if isinstance(config, RunConfig) and config.algorithm != "eval":
            derive_batch(config, world_size=1, on_cpu=True)
    used = {path for step in steps for path in step.stand_ins}
    made = {path for step in steps for path in step.makes.values()}
    assert used and used <= made
