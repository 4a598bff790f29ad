"""Every shipped recipe is a whole run: it resolves, its sizes divide, and TRL's fields in it are real."""

import pytest

from ycore.config.algorithms import ALGORITHMS
from ycore.config.recipe_files import RecipeEntry, list_recipes, load_recipe
from ycore.config.resolve import resolve_any
from ycore.config.trl_arguments import derive_batch, derive_tune_batch
from ycore.errors import ConfigError

FROM_EXAMPLES = [
    entry
    for entry in list_recipes()
    if entry.command in ALGORITHMS and ALGORITHMS[entry.command].learns_from == "examples"
]


@pytest.mark.parametrize(
    "name", [entry.name for entry in list_recipes() if entry.command == "grpo"]
)
def test_the_recipe_is_a_whole_run(name: str) -> None:
    config = resolve_any(recipe=load_recipe(name), run_name=name)
    assert config.output == f"runs/{name}"
    for world_size in (1, 2):
        derive_batch(config, world_size=world_size, on_cpu=True)


@pytest.mark.parametrize("entry", FROM_EXAMPLES, ids=str)
def test_the_recipe_of_a_trainer_without_rollouts_is_a_whole_run(entry: RecipeEntry) -> None:
    recipe = load_recipe(entry.name, command=entry.command)
    config = resolve_any(recipe=recipe, run_name=entry.name)
    assert config.output == f"runs/{entry.name}" and config.algorithm == entry.command
    for world_size in (1, 2):
        derive_tune_batch(
            config, num_rows=config.limit or 1000, world_size=world_size, on_cpu=True
        )


def test_a_recipe_is_for_its_own_command() -> None:
    with pytest.raises(
        ConfigError, match="hh-dpo is for `ycore dpo`, not sft; say ycore dpo --recipe hh-dpo"
    ):
        load_recipe("hh-dpo", command="sft")
    assert load_recipe("quickstart", command="ppo") == load_recipe("quickstart", command="eval")


def test_every_recipe_file_is_shipped_and_has_a_description() -> None:
    assert {entry.name for entry in list_recipes()} >= {
        "quickstart",
        "gsm8k-grpo",
        "sft-chat",
        "hh-dpo",
        "hh-reward",
    }
    assert all(entry.description for entry in list_recipes())
