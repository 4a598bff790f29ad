"""Every shipped recipe is a whole run: it resolves, its sizes divide, and TRL's fields in it are real."""

import pytest

from ycore.config.batch import derive_batch
from ycore.config.overrides import resolve
from ycore.config.recipes import list_recipes, load_recipe


@pytest.mark.parametrize("name", [entry.name for entry in list_recipes() if entry.command == "grpo"])
def test_the_recipe_is_a_whole_run(name: str) -> None:
    config = resolve(recipe=load_recipe(name), run_name=name)
    assert config.output == f"runs/{name}"
    for world_size in (1, 2):
        derive_batch(config, world_size=world_size, on_cpu=True)


def test_every_recipe_file_is_shipped_and_has_a_description() -> None:
    assert {entry.name for entry in list_recipes()} >= {"quickstart", "gsm8k-grpo"}
    assert all(entry.description for entry in list_recipes())
