"""A described machine refuses what it cannot run in one line, with the nearest that works, and passes the rest."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ycore.config.schema import EngineSettings, RewardConfig, RunConfig, SamplingSettings
from ycore.engine import weights
from ycore.errors import ConfigError
from ycore.launch import engines, machine_checks
from ycore.launch.device_memory import facts_here
from ycore.launch.layout import Machine, on_machine, planned_site
from ycore.launch.machine_checks import check_run, find_move

GIB = 2**30
H100 = Machine(
    tuple(range(64)), tuple("01234567"), device_bytes=80e9, host_bytes=1e12, shm_bytes=500e9
)
TWO_24 = Machine(
    tuple(range(16)), ("0", "1"), device_bytes=24e9, host_bytes=64e9, shm_bytes=32e9
)
SLICES = Machine(
    tuple(range(16)),
    ("MIG-3333", "MIG-4444"),
    device_bytes=10e9,
    host_bytes=64e9,
    shm_bytes=32e9,
)
CORES = Machine((0, 1), (), host_bytes=16e9, shm_bytes=8e9)
SMALL_SHM = Machine((0, 1), (), host_bytes=16e9, shm_bytes=64 * 2.0**20)
BIG, SMALL = "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"
EIGHT = "Qwen/Qwen3-8B"


def test_a_deterministic_run_has_one_rank() -> None:
    check(CORES, deterministic=True)
    with pytest.raises(
        ConfigError, match="--deterministic is for one, not 2; take --processes 1"
    ):
        check(CORES, deterministic=True, processes=2)
    with pytest.raises(
        ConfigError,
        match=r"wait together from one seed.*leave --deterministic out, or install vLLM",
    ):
        check(CORES, deterministic=True, engine={"kind": "transformers"})


def test_rounds_ahead_need_engines_that_are_awake_while_the_trainer_trains() -> None:
    ahead: dict[str, Any] = {"sampling": {"max_staleness": 1}}
    check(CORES, **ahead)
    with pytest.raises(
        ConfigError,
        match="engines and trainer take turns on a device; leave --max-staleness out",
    ):
        check(H100, engine={"sleep": True}, **ahead)
    with pytest.raises(ConfigError, match="transformers writes with the trainer's own model"):
        check(CORES, engine={"kind": "transformers"}, **ahead)
    with pytest.raises(
        ConfigError, match="counts steps of one round each, and a round here has 2"
    ):
        check(CORES, trl={"num_iterations": 2}, **ahead)
    with pytest.raises(ConfigError, match="--replay has no engines"):
        check(CORES, replay="runs/other", **ahead)


@pytest.mark.parametrize(
    ("engine", "sampling", "message"),
    [
        (
            {},
            {"reuse": 0.25},
            "with sampling.reuse engines record each token's log-probability",
        ),
        ({"devices": 1}, {}, "with engine.devices engines have devices of their own"),
    ],
)
def test_what_needs_engines_of_their_own(
    engine: dict[str, Any], sampling: dict[str, Any], message: str
) -> None:
    check(CORES, engine=engine, sampling=sampling)
    with pytest.raises(
        ConfigError, match=f"{message}, and transformers does not; leave it out"
    ):
        check(CORES, engine={"kind": "transformers", **engine}, sampling=sampling)


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"rebalance": True}},
        {"sampling": {"max_staleness": 0}},
        {"deterministic": True},
        {"accelerate": "zero2"},
        {"engine": {"devices": 6, "rebalance": True, "hosts": ["b"]}},
    ],
    ids=["nothing to move", "in turns", "by the clock", "shards", "hosts"],
)
def test_devices_move_only_where_a_run_can_go_on_with_other_ranks(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "machine_of", lambda host: H100)
    settings = {
        "engine": {"devices": 6, "rebalance": True},
        "sampling": {"max_staleness": 2},
    }
    check(H100, **settings)
    with pytest.raises(
        ConfigError, match=r"engine\.rebalance needs engine\.devices.*leave it out"
    ):
        check(H100, **(settings | changed))


def test_a_division_that_the_machine_cannot_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts divide among 1, 2 and 4 ranks: with 3 or 5 engines a GPU would be idle."""
    monkeypatch.setattr(machine_checks, "this_machine", lambda: H100)
    row = {"ycore/engine_devices": 6.0, "ycore/time/step": 60.0, "ycore/time/train": 60.0}
    row |= {"ycore/time/round": 20.0, "ycore/idle_share": 0.0}
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)
    config = RunConfig(
        model=SMALL,
        dataset="task:addition",
        output=str(tmp_path),
        rewards=[RewardConfig(reward="exact_answer")],
        engine=EngineSettings(devices=6),
        sampling=SamplingSettings(max_staleness=2),
    )
    config = on_machine(config, H100)
    site = planned_site(config, H100)
    site.folder.metrics.write_text(11 * f"{json.dumps(row)}\n")
    said = list[str]()
    moved = find_move(config, site, said.append, step=11, cost_s=1.0)
    assert moved is not None and (moved.engine.devices, moved.processes) == (4, 4)
    assert len(said) == 1 and "engine.devices=4 would take" in said[0]
    for step, cost_s in ((config.steps, 1.0), (config.steps - 1, 31.0)):
        assert find_move(config, site, said.append, step=step, cost_s=cost_s) is None
    assert len(said) == 1


def test_engines_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "machine_of", lambda host: CORES)
    check(CORES, engine={"hosts": ["b"], "count": 0})
    with pytest.raises(ConfigError, match=r"stay awake; take engine\.count=0"):
        check(H100, engine={"hosts": ["b"], "sleep": True})
    with pytest.raises(ConfigError, match=r"count 0 leaves no engine; .* in engine.hosts"):
        check(CORES, engine={"count": 0})
    with pytest.raises(ConfigError, match=r"engine\.hosts .* leave engine\.sync=ipc out"):
        check(CORES, engine={"hosts": ["b"], "sync": "ipc"})
    with pytest.raises(ConfigError, match="on other machines, and transformers does not"):
        check(CORES, engine={"hosts": ["b"], "kind": "transformers"})
    with pytest.raises(
        ConfigError, match=r"engine\.hosts must name each machine once; .*\['b', 'b'\]"
    ):
        check(CORES, engine={"hosts": ["b", "b"]})
    check(CORES, judge=SMALL, engine={"hosts": ["b"]})


def test_engines_of_a_slot_are_as_many_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "machine_of", lambda host: H100)
    settings: dict[str, Any] = {"judge": SMALL, "engine": {"hosts": ["b"], "sleep": False}}
    check(H100, model=EIGHT, **settings)
    narrow = replace(TWO_24, device_bytes=16e9)
    monkeypatch.setattr(engines, "machine_of", lambda host: narrow)
    with pytest.raises(ConfigError, match=r"another share of a slot.*; set tensor_parallel"):
        check(H100, model=EIGHT, **settings)


def test_completions_of_several_rounds_need_engines_that_give_back_what_they_began() -> None:
    check(CORES, sampling={"oversample": 1.5})
    with pytest.raises(
        ConfigError, match="give back what they have begun, and transformers does not"
    ):
        check(CORES, engine={"kind": "transformers"}, sampling={"oversample": 1.5})


def check(
    machine: Machine,
    *,
    judge: str | None = None,
    judge_width: int | None = None,
    engine: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    rewards = [RewardConfig(reward="exact_answer")]
    if judge is not None:
        rewards = [
            RewardConfig(
                reward="judge:mine", args={"rubric": "right?", "verdict": {"kind": "score"}}
            )
        ]
        rewards[0].args["model"] = judge
        if judge_width is not None:
            rewards[0].args["tensor_parallel"] = judge_width
    values = {
        "model": SMALL,
        "dataset": "task:addition",
        "output": "o",
        "rewards": rewards,
        **more,
    }
    config = RunConfig(engine=EngineSettings(**(engine or {})), **values)
    check_run(config, planned_site(config, machine), vllm=True)


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (H100, {}),
        (H100, {"judge": EIGHT, "placement": "split:5:3"}),
        (H100, {"judge": EIGHT, "processes": 2, "placement": "split:1:7"}),
        (H100, {"judge": BIG}),  # on all eight devices
        (H100, {"judge": EIGHT, "judge_width": 4, "placement": "split:1:1"}),
        (TWO_24, {"judge": SMALL}),
        (TWO_24, {"model": EIGHT}),
        (TWO_24, {"model": EIGHT, "engine": {"gpu_memory_utilization": 0.8}}),
        (SLICES, {"judge": SMALL, "placement": "split:1:1"}),
        (CORES, {"judge": SMALL, "processes": 2}),
        (SMALL_SHM, {"engine": {"sync": "adapter"}}),  # the base stays where it is
        (H100, {"processes": 1, "engine": {"sync": "ipc", "count": 1}}),
        (H100, {"model": EIGHT, "sampling": {"max_staleness": 4}, "engine": {"devices": 6}}),
        (H100, {"judge": EIGHT, "placement": "split:4:2", "engine": {"devices": 6}}),
        (CORES, {"lora": None, "engine": {"sync": "ipc"}}),
        (SMALL_SHM, {"algorithm": "eval"}),
        (SMALL_SHM, {"engine": {"kind": "transformers"}}),
        (SMALL_SHM, {"model": "unknown/model"}),
    ],
)
def test_what_works_passes(machine: Machine, settings: dict[str, Any]) -> None:
    check(machine, **settings)


@pytest.mark.parametrize(
    ("machine", "settings", "message"),
    [
        (
            H100,
            {"judge": EIGHT, "placement": "split:5:4"},
            "placement split:5:4 must divide this run's slots (8) among its roles (rollout, judge); "
            "take --placement split:7:1",
        ),
        (
            H100,
            {"judge": BIG, "judge_width": 1},
            f"judge {BIG}: an engine needs 139.6 GiB (weights 135.4, a sequence of 4096 tokens 1.25), and 68.3 of a "
            "device's 74.5 GiB are left beside the 2.5 that the trainer and other engines hold; take a model of 34 "
            "billion parameters or fewer, or a judge with a base_url",
        ),
        (
            TWO_24,
            {"judge": BIG},
            f"judge {BIG}: an engine needs 70.6 GiB on each of 2 devices (weights 67.7, a sequence of 4096 tokens ",
        ),
        (
            H100,
            {"engine": {"tensor_parallel": 4}},
            "engine.tensor_parallel 4 does not divide the 14 attention heads; the nearest that works is 2",
        ),
        (
            H100,
            {"judge": EIGHT, "judge_width": 3},
            f"tensor_parallel of {EIGHT} 3 does not divide the 32 attention heads; "
            "the nearest that works is 2",
        ),
        (
            TWO_24,
            {"judge": EIGHT, "judge_width": 4},
            f"tensor_parallel of {EIGHT} 4 is more than the 2 devices that an engine can span here; "
            "the nearest that works is 2",
        ),
        (
            replace(H100, devices=tuple("012345"), device_bytes=None),
            {"model": EIGHT, "engine": {"tensor_parallel": 4}, "prompts_per_step": 6},
            "engine.tensor_parallel 4 does not divide the 6 devices; the nearest that works is 2",
        ),
        (
            SLICES,
            {"engine": {"tensor_parallel": 2}},
            "is more than the 1 devices that an engine can span here",
        ),
        (
            H100,
            {"judge": EIGHT, "judge_width": 8, "placement": "split:1:1"},
            "placement split:1:1 must divide this run's slots (1) among its roles",
        ),
        (
            H100,
            {"judge": EIGHT, "judge_width": 4, "engine": {"count": 3}},
            f"tensor_parallel of {EIGHT} 4 is more than the 2 devices that an engine can span here",
        ),
        (
            SLICES,
            {"judge": EIGHT},
            "that the trainer and other engines hold; take a model of 2 billion parameters or fewer",
        ),
        (
            H100,
            {"judge": EIGHT, "engine": {"sleep": False, "gpu_memory_utilization": 0.6}},
            "engines take 90.4 GiB at once with engine.gpu_memory_utilization=0.6, and 70.8 of a device's 74.5 can be "
            "used; lower that, or leave it out",
        ),
        (
            replace(CORES, host_bytes=12e9),
            {"judge": "Qwen/Qwen2.5-3B-Instruct"},
            f"the engines' weights take 13.3 GiB (2 of each: rollout {SMALL} 0.9, judge Qwen/Qwen2.5-3B-Instruct 5.7), "
            "and this machine has 11.2 GiB; say --set engine.count=1",
        ),
        (
            CORES,
            {"judge": BIG},
            f"and this machine has 14.9 GiB; take a smaller model than judge {BIG}",
        ),
        (
            H100,
            {"prompts_per_step": 12, "processes": 8},
            "prompts_per_step must be a multiple of the 8 ranks",
        ),
        (TWO_24, {"processes": 3}, "--processes 3 is more than the 2 devices of this machine"),
        (
            SMALL_SHM,
            {},
            "/dev/shm must hold the policy's weights: 0.92 GiB; 0.06 GiB "
            "are free; make it larger, e.g. docker run --shm-size=8g",
        ),
        (
            CORES,
            {"engine": {"count": 3}},
            "engine.count 3 is more than the 2 cores here; lower it",
        ),
        *(
            (
                machine,
                {**settings, "engine": {"sync": "adapter", **settings.get("engine", {})}},
                f"here: {reason}",
            )
            for machine, settings, reason in [
                (CORES, {"lora": None}, "all weights are trained (--full)"),
                (CORES, {"quantize": "4bit"}, "the trainer's base is quantised"),
                (
                    CORES,
                    {"accelerate": "zero3", "processes": 2},
                    "zero3, fsdp2 and hsdp cut up the base",
                ),
                (CORES, {"lora": {"r": 513}}, "engines take adapters of rank 512 at most"),
                (
                    CORES,
                    {"engine": {"tensor_parallel": 2}},
                    "workers of a wide engine divide the adapters",
                ),
                (
                    TWO_24,
                    {"engine": {"sleep": True}},
                    "engines that sleep drop their base (engine.sleep)",
                ),
                (
                    CORES,
                    {"engine": {"kind": "transformers"}},
                    "transformers is sent no weights",
                ),
            ]
        ),
        (
            TWO_24,
            {"engine": {"sleep": True, "args": {"speculative_config": {"model": "draft"}}}},
            "engines that sleep drop the weights of a draft model",
        ),
        (
            H100,
            {"processes": 1, "engine": {"sync": "ipc"}},
            "here: an engine is on another device than the trainer",
        ),
        (
            CORES,
            {"processes": 2, "engine": {"sync": "ipc"}},
            "here: engines copy from the memory of one training",
        ),
        (
            CORES,
            {"engine": {"sync": "ipc", "tensor_parallel": 2}},
            "here: a worker of a wide engine cannot open",
        ),
        (
            CORES,
            {"engine": {"sync": "ipc", "kind": "transformers"}},
            "here: transformers is sent no weights",
        ),
        (
            CORES,
            {"engine": {"kind": "transformers"}, "accelerate": "zero3"},
            "transformers generates with the trainer's own weights",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    machine: Machine, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(machine, **settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n",
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 0}\n",
    ],
)
def test_ppo_takes_no_file_of_accelerates_that_shards(text: str, tmp_path: Path) -> None:
    """Such files passed the dry run; the names `zero2` and `fsdp2` were refused."""
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    for accelerate in (str(file), "zero2", "fsdp2"):
        with pytest.raises(ConfigError, match="apart, which DeepSpeed and FSDP cannot"):
            check(TWO_24, algorithm="ppo", accelerate=accelerate, processes="auto")


def test_a_sync_takes_as_much_shared_memory_as_is_asked_for(tmp_path: Path) -> None:
    """The second sync lies over the first, each with a header of a few kilobytes in each file."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(8)))
    for _ in range(2):
        assert weights.write_weights(model, tmp_path, dtype=torch.float32) == 8192
        assert (
            8192
            < sum(file.stat().st_size for file in tmp_path.iterdir())
            < 8192 + weights.NUM_FILES * 2048
        )


def test_sizes_are_known_of_models_here_and_of_the_usual_form(tmp_path: Path) -> None:
    facts = facts_here(SMALL)
    assert facts is not None and facts.num_params == 494_032_768
    assert facts_here("nobody/nothing") is None and facts_here(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"quantization_config": {}, "hidden_size": 1}')
    assert facts_here(str(tmp_path)) is None
