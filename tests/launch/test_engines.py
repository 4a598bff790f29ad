from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import EngineSettings, RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.launch.engines import EnginePlan, Machine, choose_kind, longest_sequence, plan_engines, this_machine
from ycore.run.paths import RunFolder

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}
TWO_CORES = Machine(cores=(0, 1), devices=())
EIGHT_CORES = Machine(cores=tuple(range(8)), devices=())
TWO_DEVICES = Machine(cores=(0, 1), devices=("4", "5"))


def config_with(*, engine: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    values = {"model": "m", "dataset": "d", "output": "o", "rewards": [RewardConfig(reward="exact_answer")], **changes}
    return RunConfig(engine=EngineSettings(**(engine or {})), **values)


def plan(config: RunConfig, machine: Machine) -> EnginePlan:
    folder = RunFolder(Path("/tmp/run"))
    return plan_engines(config, folder, Path("/m"), model_config=SMOLLM2, machine=machine, vllm_installed=True)


def test_on_two_cores_each_engine_has_one() -> None:
    made = plan(config_with(max_tokens=16), TWO_CORES)
    assert made.note == "generating with vLLM: 2 engines on 1 CPU core each"
    assert [(engine.name, engine.cores, engine.device) for engine in made.engines] == [
        ("rollout-0", (0,), None),
        ("rollout-1", (1,), None),
    ]
    assert {engine.max_num_seqs for engine in made.engines} == {32}
    assert {engine.memory_gib for engine in made.engines} == {1}
    assert {engine.dtype for engine in made.engines} == {"bfloat16"}


def test_on_many_cores_two_engines_share_them() -> None:
    assert [engine.cores for engine in plan(config_with(), EIGHT_CORES).engines] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [engine.cores for engine in plan(config_with(engine={"count": 3}), EIGHT_CORES).engines] == [
        (0, 1),
        (2, 3, 4),
        (5, 6, 7),
    ]


def test_on_devices_one_engine_each() -> None:
    made = plan(config_with(), TWO_DEVICES)
    assert [(engine.cores, engine.device) for engine in made.engines] == [(None, "4"), (None, "5")]
    assert made.note == "generating with vLLM: 2 engines on devices 4, 5"
    assert not made.sleeps


@pytest.mark.parametrize(("machine", "sleep"), [(TWO_DEVICES, True), (TWO_CORES, False)])
def test_engines_sleep_on_devices_alone(machine: Machine, sleep: bool) -> None:
    folder, model = RunFolder(Path("/tmp/run")), Path("/m")
    made = plan_engines(
        config_with(), folder, model, model_config=SMOLLM2, machine=machine, vllm_installed=True, sleeps=True
    )
    assert made.sleeps == sleep and {engine.sleeps for engine in made.engines} == {sleep}


@pytest.mark.parametrize(("machine", "what"), [(TWO_CORES, "2 cores"), (TWO_DEVICES, "2 devices")])
def test_more_engines_than_slots_are_refused(machine: Machine, what: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.count 3 is more than the {what}"):
        plan(config_with(engine={"count": 3}), machine)


def test_memory_grows_with_what_runs_at_once_and_gives_way_to_what_is_said() -> None:
    small = plan(config_with(), TWO_CORES).engines[0]
    large = plan(config_with(prompts_per_step=64, max_tokens=1024), TWO_CORES).engines[0]
    wide = plan(config_with(dtype="float32", prompts_per_step=64, max_tokens=1024), TWO_CORES).engines[0]
    assert small.memory_gib < large.memory_gib < wide.memory_gib
    assert plan(config_with(engine={"memory_gib": 5}), TWO_CORES).engines[0].memory_gib == 5


def test_the_longest_sequence_is_the_models_or_what_is_said() -> None:
    assert longest_sequence(config_with(), SMOLLM2) == 4096
    assert longest_sequence(config_with(), {"max_position_embeddings": 512}) == 512
    assert longest_sequence(config_with(engine={"max_model_len": 128}), SMOLLM2) == 128
    with pytest.raises(ConfigError, match=r"max_model_len 9000 is more than the model's 8192"):
        longest_sequence(config_with(engine={"max_model_len": 9000}), SMOLLM2)


def test_without_vllm_transformers_is_chosen_and_said() -> None:
    kind, note = choose_kind("auto", vllm_installed=False)
    assert kind == "transformers"
    assert "pip install" in note
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        choose_kind("vllm", vllm_installed=False)
    assert plan(config_with(engine={"kind": "transformers"}), TWO_CORES).engines == ()


def test_an_evaluation_holds_its_samples_at_once() -> None:
    made = plan(config_with(algorithm="eval", prompts_per_step=8, num_samples=16), replace(TWO_CORES, cores=(0,)))
    assert made.engines[0].max_num_seqs == 128


def test_this_machine_has_a_core() -> None:
    assert this_machine().cores
