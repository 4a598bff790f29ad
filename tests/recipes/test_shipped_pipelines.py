"""Every shipped pipeline is whole: its references lead somewhere, and each of its stages is a run of its command."""

import pytest

from ycore.api.pipelines import parse_pipeline, stage_config
from ycore.config.recipe_files import PIPELINE, list_recipes, load_recipe
from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import derive_batch

NAMES = [entry.name for entry in list_recipes() if entry.command == PIPELINE]


def test_the_pipelines_are_found() -> None:
    assert {"rlhf-pipeline", "iterative-dpo"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_a_whole_pipeline(name: str) -> None:
    pipeline = parse_pipeline(load_recipe(name, command=PIPELINE), name=name)
    assert str(pipeline.folder) == f"runs/{name}"
    for stage in pipeline.stages:
        config = stage_config(stage, stage.keys)
        assert config.output == str(stage.folder)
        if isinstance(config, RunConfig) and config.algorithm != "eval":
            derive_batch(config, world_size=1, on_cpu=True)
    assert any(stage.check_keys != stage.keys for stage in pipeline.stages)
