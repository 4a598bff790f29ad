import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import EngineSettings, RewardConfig, RunConfig
from ycore.engine.kinds import TRANSFORMERS, VLLM, choose_kind
from ycore.engine.vllm_plugin import SERVED
from ycore.errors import ConfigError
from ycore.launch import engines
from ycore.launch.engine_watch import start_order
from ycore.launch.engines import EnginePlan, model_length, plan_engines
from ycore.launch.layout import ONE_RANK, Machine, Site, this_machine
from ycore.run.files import RunFolder

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
Plan = Callable[..., EnginePlan]


def config_with(*, engine: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    values = {
        "model": "m",
        "dataset": "d",
        "output": "o",
        "rewards": [RewardConfig(reward="exact_answer")],
        **changes,
    }
    return RunConfig(engine=EngineSettings(**(engine or {})), **values)


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Plan for SmolLM2's shape, as its config.json says it."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))

    def made(config: RunConfig, machine: Machine, *, trains: bool = True) -> EnginePlan:
        site = Site(RunFolder(Path("/tmp/run")), ONE_RANK, machine, trains)
        return plan_engines(config, site, fetch=lambda name: tmp_path)

    return made


def test_on_two_cores_each_engine_has_one(plan: Plan) -> None:
    made = plan(config_with(max_tokens=16), TWO_CORES)
    assert made.note == "generating with vLLM: 2 engines on 1 CPU core each"
    assert [(engine.name, engine.cores, engine.devices) for engine in made.engines] == [
        ("rollout-0", (0,), ()),
        ("rollout-1", (1,), ()),
    ]
    assert {engine.max_num_seqs for engine in made.engines} == {32}
    assert {engine.memory_gib for engine in made.engines} == {1}
    assert {engine.dtype for engine in made.engines} == {"bfloat16"}


def test_on_many_cores_two_engines_share_them(plan: Plan) -> None:
    assert [engine.cores for engine in plan(config_with(), EIGHT_CORES).engines] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    assert [
        engine.cores for engine in plan(config_with(engine={"count": 3}), EIGHT_CORES).engines
    ] == [
        (0, 1),
        (2, 3, 4),
        (5, 6, 7),
    ]


def test_on_devices_one_engine_each(plan: Plan) -> None:
    made = plan(config_with(algorithm="eval"), TWO_DEVICES, trains=False)
    assert [(engine.cores, engine.devices) for engine in made.engines] == [
        ((), ("4",)),
        ((), ("5",)),
    ]
    assert made.note == (
        "generating with vLLM: 2 engines on devices 4, 5; the sizes of a model or device are not known"
    )
    assert not made.sleeps and {engine.gpu_memory_utilization for engine in made.engines} == {
        0.9
    }


@pytest.mark.parametrize(("machine", "sleep"), [(TWO_DEVICES, True), (TWO_CORES, False)])
def test_engines_sleep_on_devices_alone(machine: Machine, sleep: bool, plan: Plan) -> None:
    made = plan(config_with(), machine)
    assert made.sleeps == sleep and {engine.sleeps for engine in made.engines} == {sleep}


@pytest.mark.parametrize(
    ("machine", "slots"), [(TWO_CORES, "2 cores"), (TWO_DEVICES, "2 devices")]
)
def test_more_engines_than_slots_are_refused(machine: Machine, slots: str, plan: Plan) -> None:
    with pytest.raises(ConfigError, match=f"engine.count 3 is more than the {slots}"):
        plan(config_with(engine={"count": 3}), machine)


def test_memory_grows_with_what_runs_at_once_and_gives_way_to_what_is_said(plan: Plan) -> None:
    small = plan(config_with(), TWO_CORES).engines[0]
    large = plan(config_with(prompts_per_step=64, max_tokens=1024), TWO_CORES).engines[0]
    wide = plan(
        config_with(dtype="float32", prompts_per_step=64, max_tokens=1024), TWO_CORES
    ).engines[0]
    assert small.memory_gib < large.memory_gib < wide.memory_gib
    assert plan(config_with(engine={"memory_gib": 5}), TWO_CORES).engines[0].memory_gib == 5


def test_the_longest_sequence_is_the_models_or_what_is_said(plan: Plan) -> None:
    assert plan(config_with(), TWO_CORES).max_model_len == 4096
    assert model_length(None, {"max_position_embeddings": 512}, option="max_model_len") == 512
    assert plan(config_with(engine={"max_model_len": 128}), TWO_CORES).max_model_len == 128
    long = plan(config_with(max_tokens=6000), TWO_CORES)
    assert long.max_model_len == long.engines[0].max_model_len == 8048, (
        "a prompt has 2,048 of them"
    )
    assert plan(config_with(max_tokens=7000), TWO_CORES).max_model_len == 8192
    with pytest.raises(
        ConfigError, match=r"engine.max_model_len 9000 is more than the model's 8192"
    ):
        plan(config_with(engine={"max_model_len": 9000}), TWO_CORES)


def test_without_vllm_transformers_is_chosen_and_said(plan: Plan) -> None:
    kind, note = choose_kind("auto", is_installed=False)
    assert kind is TRANSFORMERS
    assert "pip install" in note
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        choose_kind("vllm", is_installed=False)
    assert plan(config_with(engine={"kind": "transformers"}), TWO_CORES).engines == ()


def test_of_policies_that_see_vllm_serves_what_was_held_to_the_trainer(plan: Plan) -> None:
    for family in SERVED:
        assert choose_kind("auto", is_installed=True, family=family)[0] is VLLM
    kind, note = choose_kind("auto", is_installed=True, family="internvl")
    assert kind is TRANSFORMERS and "not for internvl" in note
    with pytest.raises(
        ConfigError, match=r"for llava, .*, not for internvl; take --engine transformers"
    ):
        choose_kind("vllm", is_installed=True, family="internvl")


def test_an_evaluation_holds_its_samples_at_once(plan: Plan) -> None:
    made = plan(
        config_with(algorithm="eval", prompts_per_step=8, num_samples=16),
        Machine(cores=(0,), devices=()),
    )
    assert made.engines[0].max_num_seqs == 128


def test_this_machine_has_a_core() -> None:
    assert this_machine().cores


# -- engines of several devices ---------------------------------------------------------------------------------------

EIGHT_DEVICES = Machine(cores=(0, 1), devices=tuple("01234567"))
TWELVE_HEADS = {**SMOLLM2, "num_attention_heads": 12, "num_key_value_heads": 4}


def judged(width: int, **changes: Any) -> RunConfig:
    args = {
        "rubric": "right?",
        "verdict": {"kind": "score"},
        "model": "wide",
        "tensor_parallel": width,
    }
    return config_with(rewards=[RewardConfig(reward="judge:mine", args=args)], **changes)


def test_an_engine_of_two_devices_has_neighbours(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**TWELVE_HEADS, "intermediate_size": 1536, "vocab_size": 49152})
    )
    made = plan(config_with(engine={"tensor_parallel": 2}), EIGHT_DEVICES)
    assert [engine.devices for engine in made.engines] == [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "7"),
    ]
    assert {engine.tensor_parallel for engine in made.engines} == {2} and made.num_slots == 4
    assert "4 engines on devices 0, 1, 2, 3, 4, 5, 6, 7, tensor parallel over 2;" in made.note
    on_cores = plan(config_with(engine={"tensor_parallel": 2}), TWO_CORES)
    assert [(engine.cores, engine.tensor_parallel) for engine in on_cores.engines] == [
        ((0, 1), 2)
    ] and on_cores.num_slots == 1


def test_beside_a_judge_of_four_devices_a_slot_has_four_policy_engines(
    plan: Plan, tmp_path: Path
) -> None:
    """Slots are aligned blocks, and all engines of a role on a slot are on its devices and on no others."""
    (tmp_path / "config.json").write_text(
        json.dumps({**TWELVE_HEADS, "intermediate_size": 1536, "vocab_size": 49152})
    )
    made = plan(judged(4), EIGHT_DEVICES)
    rollouts, judges = (model.engines for model in made.served)
    assert [engine.devices for engine in rollouts] == [(device,) for device in "01234567"]
    assert [engine.devices for engine in judges] == [tuple("0123"), tuple("4567")]
    assert made.num_slots == made.as_json()["num_slots"] == 2
    assert {engine.max_num_seqs for engine in rollouts} == {8} and {
        engine.max_num_seqs for engine in judges
    } == {32}
    turns_of = [[engine.name for engine in turn] for turn in start_order([*rollouts, *judges])]
    assert turns_of == [[f"rollout-{n}" for n in range(8)], ["judge-0", "judge-1"]]


def test_models_that_score_have_engines_on_hosts_too(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "machine_of", lambda host: EIGHT_CORES)
    config = judged(1)
    settings = config.engine.model_copy(update={"hosts": ["b"], "count": 1})
    made = plan(config.model_copy(update={"engine": settings}), TWO_CORES)
    for role, model in zip(("rollout", "judge"), made.served, strict=True):
        assert [(engine.name, engine.cores, engine.host) for engine in model.engines] == [
            (f"{role}-0", (0, 1), ""),
            (f"{role}-1", (0, 1, 2, 3), "b"),
            (f"{role}-2", (4, 5, 6, 7), "b"),
        ]
    listed = made.as_json()
    assert listed["num_slots"] == 3 and listed["away"] == ["rollout-1", "rollout-2"]
    assert listed["scorers"][0]["engines"] == ["judge-0", "judge-1", "judge-2"]


def test_a_width_that_is_no_share_of_the_widest_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **TWELVE_HEADS,
                "num_key_value_heads": 12,
                "intermediate_size": 1536,
                "vocab_size": 49152,
            }
        )
    )
    twelve = Machine(cores=(0,), devices=tuple("0123456789ab"))
    with pytest.raises(
        ConfigError,
        match=r"widest engine spans, 3, and engines of m span 2, which does not divide",
    ):
        plan(judged(3, engine={"tensor_parallel": 2}), twelve)
