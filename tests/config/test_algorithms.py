"""The table of algorithms: each row names a trainer, a config class and a way to learn that exist."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import typer
from ycore_cli.train import training_command

from ycore.config.algorithms import ALGORITHMS, Algorithm, find_algorithm
from ycore.config.schema import EvalConfig, RunConfig, TuneConfig
from ycore.config.trl_fields import fields_of
from ycore.errors import ConfigError


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda row: row.name)
def test_a_row_names_what_exists(algorithm: Algorithm) -> None:
    assert ALGORITHMS[algorithm.name] is algorithm
    assert find_spec(algorithm.trainer.partition(":")[0]) is not None
    assert fields_of(algorithm.trl_config)
    learns_from_rollouts = algorithm.learns_from == "rollouts"
    assert issubclass(algorithm.config, RunConfig if learns_from_rollouts else TuneConfig)
    if learns_from_rollouts:
        keys = set(algorithm.config.model_fields)
        for key in ("advantage", "preset", "divergence", "trust_region"):
            assert (key in algorithm.lacks) == (key not in keys)
    assert (algorithm.rows is None) == learns_from_rollouts


def test_an_evaluation_samples_as_grpo_does() -> None:
    row = find_algorithm("eval")
    assert (row.trl_config, row.config) == ("GRPOConfig", EvalConfig)


@pytest.mark.parametrize("name", ["gpro", None, 3])
def test_an_unknown_algorithm_is_refused_with_those_that_exist(name: object) -> None:
    with pytest.raises(ConfigError, match=r"one of grpo, .*, eval, flow; it is ") as caught:
        find_algorithm(name)
    assert ("did you mean 'grpo'" in str(caught.value)) == (name == "gpro")


def test_a_new_row_is_a_new_command() -> None:
    app = typer.Typer()
    app.command("orpo")(
        training_command(replace(ALGORITHMS["dpo"], name="orpo", summary="Train with ORPO."))
    )
    app.command("dpo")(training_command(ALGORITHMS["dpo"]))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [option.name for option in commands["orpo"].params] == [
        option.name for option in commands["dpo"].params
    ]
    assert (
        commands["orpo"].help.startswith("Train with ORPO.")
        and "ycore orpo --recipe" in commands["orpo"].help
    )
