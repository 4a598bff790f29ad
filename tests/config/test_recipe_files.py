"""Recipes by name and by file, and what is said of those that cannot be read."""

import os
from pathlib import Path

import pytest

from ycore.config.recipe_files import list_recipes, load_recipe, recipe_name
from ycore.errors import ConfigError


def test_shipped_recipes_have_names_and_descriptions() -> None:
    entries = list_recipes()
    assert "quickstart" in [entry.name for entry in entries]
    assert all(entry.description for entry in entries)
    assert [entry.name for entry in entries if "GPU" in entry.never_run] == [
        "countdown-grpo",
        "deepscaler-8k",
        "gsm8k-dapo",
        "gsm8k-grpo",
        "open-r1-math",
    ]


def test_a_file_is_a_recipe_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("description: mine\nnever_run: it is new\nmodel: m\nsteps: 3\n")
    assert load_recipe(str(file)) == {"model": "m", "steps": 3}
    assert (recipe_name(str(file)), recipe_name("quickstart")) == ("mine", "quickstart")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nmodel: [m\n", "line 3: not YAML"),
        ("steps: 3\n\tmodel: m\n", "line 2: not YAML"),
        ("- model: m\n", "must be a mapping of keys .* it is a list"),
        ("", "it is empty"),
        ("3: 4\n", "must be a mapping of keys"),
        ("model: !!python/object:os.system {}\n", "line 1: not YAML"),
        ("model: \x07\n", "is not YAML"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_line(
    text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_recipe(str(file))
    assert "\n" not in str(caught.value)


def test_unknown_names_get_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match="no recipe 'quikstart'; did you mean 'quickstart'"):
        load_recipe("quikstart")
    with pytest.raises(ConfigError, match=r"no recipe 'zzz'; there are .*quickstart"):
        load_recipe("zzz")
    with pytest.raises(ConfigError, match=r"no such recipe file: .*did you mean 'mine.yaml'"):
        load_recipe(str(tmp_path / "mines.yaml"))
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_recipe(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: " + "[" * 3000, "not YAML"),
        ("model: 2024-99-99\n", "not YAML: month must be"),
        ("steps: " + "9" * 5000, "not YAML: Exceeds the limit"),
    ],
)
def test_an_impossible_value_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)


def test_a_recipe_is_a_file_of_a_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(ConfigError, match=r"fifo\.yaml cannot be read as text: it is a FIFO"):
        load_recipe(str(tmp_path / "fifo.yaml"))
    (tmp_path / "large.yaml").touch()
    os.truncate(tmp_path / "large.yaml", 2**35)
    with pytest.raises(ConfigError, match=r"it has 34359738368 bytes, and at most 1048576"):
        load_recipe(str(tmp_path / "large.yaml"))


def test_yaml_that_repeats_itself_stays_small(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for name, before in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_recipe(str(tmp_path / "bomb.yaml"))
    (tmp_path / "ring.yaml").write_text("model: &a [*a]\n")
    with pytest.raises(ConfigError, match="nested"):
        load_recipe(str(tmp_path / "ring.yaml"))
