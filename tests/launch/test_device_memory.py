"""Described machines: for every process of a run its devices, its turn to start, and its share of the memory."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ycore.config.learners import DistillConfig
from ycore.config.schema import EngineSettings, RewardConfig, RunConfig
from ycore.engine.commands import engine_command, engine_environment
from ycore.errors import ConfigError
from ycore.launch.device_memory import fit_devices, max_sequences
from ycore.launch.engine_watch import start_order
from ycore.launch.engines import EnginePlan, plan_engines
from ycore.launch.layout import ONE_RANK, Machine, Site, layout_of, on_machine
from ycore.launch.machine_checks import check_run
from ycore.models.model_facts import KNOWN_CONFIGS, facts_of
from ycore.plan.memory import Strategy, trainer_memory, workload_of
from ycore.run.files import RunFolder

GIB = 2**30
H100 = Machine(
    tuple(range(64)), tuple("01234567"), 79.6 * GIB, 79.1 * GIB, host_bytes=1e12, shm_bytes=5e11
)
ONE_80 = replace(H100, devices=("0",))
TWO_24 = Machine(
    tuple(range(16)), ("0", "1"), 24.0 * GIB, 23.6 * GIB, host_bytes=64e9, shm_bytes=32e9
)
ONE_24 = replace(TWO_24, devices=("0",))
SLICES = Machine(tuple(range(16)), ("MIG-a", "MIG-b"), 10e9, host_bytes=64e9, shm_bytes=32e9)
WSL2 = Machine(
    tuple(range(16)), ("0",), 12.0 * GIB, 10.5 * GIB, host_bytes=32e9, shm_bytes=16e9
)  # a screen takes the rest
HALF, THREE, SEVEN, EIGHT, FOURTEEN = (
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-14B-Instruct",
)  # fmt: skip


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)


def config_of(
    model: str, *, judge: str | None = None, engine: dict[str, Any] | None = None, **more: Any
) -> RunConfig:
    rewards = [RewardConfig(reward="exact_answer")]
    if judge is not None:
        args = {"rubric": "right?", "verdict": {"kind": "score"}, "model": judge}
        rewards.append(RewardConfig(reward="judge:mine", args=args))
    settings = {
        "model": model,
        "dataset": "task:addition",
        "output": "o",
        "rewards": rewards,
        **more,
    }
    kind = DistillConfig if more.get("algorithm") == "distill" else RunConfig
    return kind(engine=EngineSettings(**(engine or {})), **settings)


def site_on(config: RunConfig, machine: Machine, *, trains: bool = True) -> Site:
    layout = layout_of(config, machine) if trains else ONE_RANK
    return Site(RunFolder(Path("/tmp/run")), layout, machine, trains)


def plan(
    config: RunConfig, machine: Machine, folder: Path, *, trains: bool = True
) -> EnginePlan:
    def fetch(name: str) -> Path:
        (folder / Path(name).name).mkdir(exist_ok=True)
        (folder / Path(name).name / "config.json").write_text(json.dumps(KNOWN_CONFIGS[name]))
        return folder / Path(name).name

    made = plan_engines(config, site_on(config, machine, trains=trains), fetch=fetch)
    checked = check_run(config, site_on(config, machine, trains=trains), vllm=True)
    assert checked is not None and made.sharing is not None
    assert (checked.shares, checked.sleeps) == (made.sharing.shares, made.sharing.sleeps), (
        "the dry run says the same"
    )
    return made


def share_of(made: EnginePlan, role: str = "rollout") -> float:
    return next(
        model.engines[0].gpu_memory_utilization for model in made.served if model.role == role
    )


def cache_gib(made: EnginePlan, machine: Machine, model: str, *, size: int = 2) -> float:
    """Return vLLM's GiB for its cache: its share, less weights, and 1.5 GiB for a prefill step and the process."""
    assert machine.device_bytes is not None
    sizes = {THREE: 3.09e9, FOURTEEN: 14.77e9, SEVEN: 7.62e9}
    return (share_of(made) * machine.device_bytes - sizes[model] * size) / GIB - 1.5


def test_a_14b_model_fits_on_80_gb(tmp_path: Path) -> None:
    """With the share that was once fixed, 0.3 of 80 GB, its weights of 27.5 GiB found no room."""
    made = plan(config_of(FOURTEEN), ONE_80, tmp_path)
    assert share_of(made) * 79.6 > 27.5 + 1.5 and cache_gib(made, ONE_80, FOURTEEN) > 4
    fixed = config_of(FOURTEEN, engine={"gpu_memory_utilization": 0.3})
    with pytest.raises(
        ConfigError,
        match=r"30\.6 GiB .*24\.4 of a device's 79\.6 GiB are left.*engine\.gpu_memory_utilization, or leave",
    ):
        check_run(fixed, site_on(fixed, ONE_80), vllm=True)


def test_a_3b_model_on_24_gb_has_a_cache_that_suffices(tmp_path: Path) -> None:
    """64 sequences of 768 tokens, 36 KiB a token, are 1.7 GiB; 0.3 of the device left 0.1 of them."""
    made = plan(config_of(THREE), ONE_24, tmp_path)
    assert cache_gib(made, ONE_24, THREE) > 1.6
    assert made.engines[0].max_num_seqs == 64


def test_what_fits_together_stays_awake_and_what_does_not_sleeps(tmp_path: Path) -> None:
    small, large = (
        plan(config_of(HALF), ONE_80, tmp_path),
        plan(config_of(FOURTEEN), ONE_80, tmp_path),
    )
    assert not small.sleeps and small.as_json()["offload"] == "none"
    assert small.note.endswith(
        "engines stay awake beside the trainer, and the optimizer's state stays on the device"
    )
    assert large.sleeps and "engines sleep while the trainer trains" in large.note
    forced = plan(
        config_of(HALF, engine={"sleep": True, "offload": "weights"}), ONE_80, tmp_path
    )
    assert forced.sleeps and forced.as_json()["offload"] == "weights"


def test_only_what_has_to_leaves_the_device(tmp_path: Path) -> None:
    full = config_of(THREE, lora=None, trl={"per_device_train_batch_size": 8})
    large, small = (
        replace(ONE_80, device_bytes=gib * GIB, free_bytes=None) for gib in (80, 64)
    )
    assert plan(full, large, tmp_path).as_json()["offload"] == "none"
    crowded = plan(full, small, tmp_path)
    assert crowded.as_json()["offload"] == "optimizer", "nothing else is frozen, or leaves"
    assert (
        "train needs 61.1 and 60.8 can be used: lower --per-device-train-batch-size"
        in crowded.note
    )
    assert plan(config_of(THREE), ONE_24, tmp_path).as_json()["offload"] == "none", (
        "to sleep is enough"
    )
    assert plan(config_of(SEVEN), ONE_24, tmp_path).as_json()["offload"] == "weights"


def test_eight_devices_with_a_judge(tmp_path: Path) -> None:
    config = config_of(FOURTEEN, judge=FOURTEEN, placement="split:5:3")
    made, site = plan(config, H100, tmp_path), site_on(config, H100)
    assert made.sleeps and 0.35 < share_of(made) < share_of(made, "judge") < 0.95
    specs = [engine for model in made.served for engine in model.engines]
    assert [[engine.name for engine in turn] for turn in start_order(specs)] == [
        [f"rollout-{n}" for n in range(8)],
        [f"judge-{n}" for n in range(8)],
    ]
    for engine in specs:
        assert engine_environment(engine)["CUDA_VISIBLE_DEVICES"] == engine.name[-1]
        assert "--enable-sleep-mode" in engine_command(engine)
    assert (
        site.layout.local == 8
        and site.trainer_environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    )


def test_two_small_devices_share_a_small_model_with_a_judge(tmp_path: Path) -> None:
    made = plan(config_of(HALF, judge=HALF), TWO_24, tmp_path)
    assert [engine.devices for model in made.served for engine in model.engines] == [
        ("0",),
        ("1",),
        ("0",),
        ("1",),
    ]
    if not made.sleeps:
        assert share_of(made) + share_of(made, "judge") < 0.95


def test_slices_of_a_device_are_devices(tmp_path: Path) -> None:
    config = config_of(HALF, judge=HALF, placement="split:1:1")
    made = plan(config, SLICES, tmp_path)
    assert [engine_environment(engine)["CUDA_VISIBLE_DEVICES"] for engine in made.engines] == [
        "MIG-a",
        "MIG-b",
    ]
    assert site_on(config, SLICES).trainer_environment["CUDA_VISIBLE_DEVICES"] == "MIG-a"


def test_what_others_hold_of_a_device_is_not_shared_out(tmp_path: Path) -> None:
    """vLLM compares its share with what is free when it starts."""
    made = plan(config_of(HALF), WSL2, tmp_path)
    assert share_of(made) * 12.0 < 10.5
    crowded = replace(WSL2, free_bytes=6.5 * GIB)
    with pytest.raises(
        ConfigError, match=r"an engine needs .* and 6\.5 of a device's 12\.0 GiB are left;"
    ):
        check_run(
            config_of(THREE, algorithm="eval"),
            site_on(config_of(THREE), crowded, trains=False),
            vllm=True,
        )


def test_an_evaluation_gives_the_whole_device_to_engines(tmp_path: Path) -> None:
    config = config_of(FOURTEEN, algorithm="eval", num_samples=64)
    made = plan(config, ONE_80, tmp_path, trains=False)
    assert not made.sleeps and share_of(made) > 0.5
    judged = plan(
        config_of(FOURTEEN, judge=FOURTEEN, algorithm="eval"), ONE_80, tmp_path, trains=False
    )
    assert 0.7 < share_of(judged) + share_of(judged, "judge") < 0.95


def test_a_teacher_in_the_trainer_takes_room_from_the_engines(tmp_path: Path) -> None:
    taught = {"algorithm": "distill", "rewards": [RewardConfig(reward=f"teacher:{SEVEN}")]}
    beside = plan(config_of(HALF, distill={"divergence": "js"}, **taught), ONE_24, tmp_path)
    alone = plan(config_of(HALF), ONE_24, tmp_path)
    assert (alone.sleeps, beside.sleeps) == (False, True) and beside.as_json()[
        "offload"
    ] == "weights"


def test_a_size_that_is_not_known_keeps_the_careful_shares() -> None:
    config = config_of("somebody/model", judge="somebody/judge")
    shared = check_run(config, site_on(config, ONE_80), known=lambda name: None, vllm=True)
    assert shared is not None and shared.sleeps and shared.offload == "optimizer"
    assert dict(shared.shares) == {"rollout": [0.3], "judge": [0.3]}
    awake = config_of(
        "somebody/model",
        judge="somebody/judge",
        engine={"sleep": False, "gpu_memory_utilization": 0.4},
    )
    shared = check_run(awake, site_on(awake, ONE_80), known=lambda name: None, vllm=True)
    assert (
        shared is not None
        and not shared.sleeps
        and dict(shared.shares) == {"rollout": [0.4], "judge": [0.4]}
    )


def test_more_sequences_at_once_get_more_cache(tmp_path: Path) -> None:
    made = plan(config_of(THREE, engine={"args": {"max_num_seqs": 256}}), ONE_80, tmp_path)
    few = plan(config_of(THREE), ONE_80, tmp_path)
    assert made.engines[0].max_num_seqs == 256 and made.as_json()["max_num_seqs"] == 256
    assert share_of(made) > share_of(few) + 0.05


def fitted(config: RunConfig, machine: Machine) -> RunConfig:
    return fit_devices(on_machine(config, machine), machine)


def test_the_micro_batch_is_the_largest_that_a_device_has_room_for(tmp_path: Path) -> None:
    """LoRA of 7B on 24 GB with all defaults needed 27.9 GiB of 22.8, was announced, and started."""
    config = fitted(config_of(SEVEN), ONE_24)
    assert config.trl["per_device_train_batch_size"] < 32
    made = plan(config, ONE_24, tmp_path)
    assert made.sharing is not None and "can be used" not in made.sharing.line
    assert fitted(config_of(HALF), ONE_80).trl == {}, "where the usual one fits, it is taken"
    named = config_of(SEVEN, trl={"per_device_train_batch_size": 4})
    assert fitted(named, ONE_24).trl == named.trl


def test_more_engines_than_devices_are_named_before_their_memory() -> None:
    config = config_of(SEVEN, lora=None, engine={"count": 2})
    with pytest.raises(ConfigError, match=r"engine.count 2 is more than the 1 .*; lower it"):
        fit_devices(config, ONE_80)


def test_states_that_ddp_cannot_hold_are_divided(tmp_path: Path) -> None:
    """All weights of 7B on eight devices of 80 GB needed 174 GiB of 75.7 by ddp, and were told of the batch size."""
    config = fitted(config_of(SEVEN, lora=None), H100)
    assert config.accelerate == "zero2"
    made = plan(config, H100, tmp_path)
    assert made.sharing is not None and "can be used" not in made.sharing.line
    assert fitted(config_of(SEVEN), H100).accelerate is None


@pytest.mark.parametrize(
    ("machine", "settings", "way_out"),
    [
        (ONE_24, {"lora": None}, r"take LoRA \(leave --full out\)"),
        (ONE_24, {"model": FOURTEEN}, "take a smaller model"),
        (H100, {"lora": None, "accelerate": "ddp"}, "take --accelerate zero2"),
        (
            ONE_24,
            {"model": "Qwen/Qwen2.5-72B-Instruct"},
            "take a smaller model, or larger or more devices",
        ),
    ],
)
def test_a_trainer_that_cannot_fit_is_refused_with_what_fits(
    machine: Machine, settings: dict[str, Any], way_out: str
) -> None:
    config = config_of(**({"model": SEVEN} | settings))
    rule = r"holds [\d.]+ GiB on each device before any activations, and [\d.]+ of its"
    with pytest.raises(ConfigError, match=f"{rule} .*; {way_out}"):
        fitted(config, machine)


def described(
    count: int, gib: float, *, host_gb: float, shm_bytes: float | None = None
) -> Machine:
    names = tuple(map(str, range(count)))
    shared = (
        host_gb * 5e8 if shm_bytes is None else shm_bytes
    )  # half of the host's memory, Linux's default
    free_bytes = (gib - 0.4) * GIB
    host_bytes = host_gb * 1e9
    return Machine(
        tuple(range(16)), names, gib * GIB, free_bytes, host_bytes=host_bytes, shm_bytes=shared
    )


DOCKER = 64 * 2.0**20
MACHINES = {
    "1x16": described(1, 15.9, host_gb=64),
    "1x24": described(1, 24, host_gb=64),
    "2x24": described(2, 24, host_gb=128),
    "3x24": described(3, 24, host_gb=128),
    "1x48": described(1, 47.5, host_gb=128),
    "6x40": described(6, 40, host_gb=512),
    "8x80": described(8, 79.6, host_gb=1000),
    "slices of MIG": SLICES,
    "1x24, Docker's /dev/shm": described(1, 24, host_gb=64, shm_bytes=DOCKER),
    "8x80, Docker's /dev/shm": described(8, 79.6, host_gb=1000, shm_bytes=DOCKER),
    "1x24, host of 32 GB": described(1, 24, host_gb=32),
    "2x24, host of 32 GB": described(2, 24, host_gb=32),
}
LARGEST = {
    "1x16": 3, "1x24": 7, "2x24": 7, "3x24": 7, "1x48": 14, "6x40": 14, "8x80": 32, "slices of MIG": 1.5,
    "1x24, Docker's /dev/shm": 7, "8x80, Docker's /dev/shm": 0, "1x24, host of 32 GB": 7,
    "2x24, host of 32 GB": 7,
}  # fmt: skip
"""Billions of weights of the largest model that the default command trains, with LoRA."""
ADVICE = {
    "--quantize 4bit": {"quantize": "4bit"},
    "LoRA (leave --full out)": {},
    "--accelerate zero2": {"accelerate": "zero2"},
    "--accelerate zero3": {"accelerate": "zero3"},
}


def refusal(machine: Machine, **settings: Any) -> str:
    """Return the line that refuses the default command; empty where it has a plan, all of which fits."""
    try:
        config = fitted(config_of(**settings), machine)
        sharing = check_run(config, site_on(config, machine), vllm=True)
    except ConfigError as error:
        return str(error)
    assert sharing is not None and "can be used" not in sharing.line, sharing.line
    return ""


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("full", [False, True])
def test_the_default_command_has_a_plan_that_fits_or_one_line_with_what_does(
    name: str, full: bool
) -> None:
    machine = MACHINES[name]
    trained = {"lora": None} if full else {}
    for size in (0.5, 1.5, 3, 7, 14, 32):
        model = f"Qwen/Qwen2.5-{size:g}B-Instruct"
        line = refusal(machine, model=model, **trained)
        if not full:
            assert (line == "") == (size <= LARGEST[name]), line
        assert not line or ("\n" not in line and re.search(r"; (take|make) ", line)), line
        way_out = line.rpartition("; take ")[2]
        if way_out in ADVICE:
            then = refusal(machine, model=model, **ADVICE[way_out])
            assert then == "" or then.startswith("/dev/shm must hold"), line


def test_advice_is_what_trainer_and_engines_both_fit_with() -> None:
    """14B on one device of 24 GB was told to take 4 bits, with which its engine of 30 GiB has no room either."""
    rule = "leaves its engines too little on each device, and 21.6 of its 24.0 GiB can be used"
    with pytest.raises(ConfigError, match=f"{rule}; take --quantize 4bit"):
        fitted(config_of(FOURTEEN), MACHINES["2x24"])


def test_the_host_must_hold_what_leaves_the_devices() -> None:
    """The frozen weights of two ranks of 7B are 28 GiB, beside 14 in /dev/shm."""
    small = MACHINES["2x24, host of 32 GB"]
    assert fitted(config_of(SEVEN), small).accelerate == "zero3", "each rank has half of them"
    ddp = config_of(SEVEN, accelerate="ddp")
    with pytest.raises(
        ConfigError, match=r"host memory must hold 29\.\d GiB of 2 ranks .*14\.2 of weights"
    ):
        check_run(ddp, site_on(ddp, small), vllm=True)
    assert fitted(config_of(SEVEN), MACHINES["1x24, host of 32 GB"]).engine.sync == "ipc"


def test_weights_go_through_the_device_where_dev_shm_is_small() -> None:
    """Docker gives /dev/shm 64 MB, which refused every run on one GPU."""
    docker = replace(ONE_24, shm_bytes=64 * 2.0**20)
    config = fitted(config_of(HALF), docker)
    assert config.engine.sync == "ipc"
    assert check_run(config, site_on(config, docker), vllm=True) is not None
    assert fitted(config_of(HALF), ONE_24).engine.sync == "auto"
    two = replace(docker, devices=("0", "1"))
    with pytest.raises(ConfigError, match=r"/dev/shm must hold .*--shm-size=8g"):
        config = fitted(config_of(HALF), two)
        check_run(config, site_on(config, two), vllm=True)


@pytest.mark.parametrize(("num_devices", "num_ranks"), [(3, 2), (5, 4), (6, 4), (7, 4), (8, 8)])
def test_the_default_step_runs_on_any_number_of_devices(
    num_devices: int, num_ranks: int
) -> None:
    """Eight prompts a step, which nobody asked for, refused 3, 5, 6 and 7 devices."""
    machine = replace(H100, devices=H100.devices[:num_devices])
    config = fitted(config_of(HALF), machine)
    assert config.processes == num_ranks
    check_run(config, site_on(config, machine), vllm=True)
    with pytest.raises(ConfigError, match="must be a multiple of the 3 ranks"):
        three = config_of(HALF, processes=3)
        check_run(three, site_on(three, H100), vllm=True)


def test_pinned_memory_is_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds each pinned tensor up to a power of two: 15.2 GB of weights took 29.0 GB of the host."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    site = site_on(config_of(HALF), ONE_24)
    setting = "pinned_max_round_threshold_mb:1"
    assert site.trainer_environment["PYTORCH_ALLOC_CONF"] == setting
    with pytest.raises(ValueError):  # torch reads this key: others it passes over
        torch._C._accelerator_setAllocatorSettings(setting.replace("1", "x"))
    for name in (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ):  # the former name, and torch's own of today
        monkeypatch.setenv(
            name, f"expandable_segments:True,roundup_power2_divisions:{len(name)}"
        )
        environment = site.trainer_environment
        assert environment == environment | {
            "PYTORCH_ALLOC_CONF": f"expandable_segments:True,roundup_power2_divisions:{len(name)},{setting}"
        }


def test_what_ranks_keep_between_steps_is_planned_as_kept() -> None:
    facts = facts_of(KNOWN_CONFIGS[SEVEN], name=SEVEN)
    work = workload_of(config_of(SEVEN, lora=None), facts)
    trained = facts.num_params
    ddp = trainer_memory(work, Strategy(8, 1, "ddp", 8))
    alone = trainer_memory(work, Strategy(1, 1, "ddp", 8))
    assert ddp.resting["none"] - alone.resting["none"] == pytest.approx(4 * trained), (
        "buckets of gradients"
    )
    zero3 = trainer_memory(work, Strategy(8, 1, "zero3", 8)).resting
    assert zero3["none"] - zero3["optimizer"] == pytest.approx(8 * trained / 8)


def test_an_evaluation_writes_as_many_at_once_as_its_engines_do_well(tmp_path: Path) -> None:
    """Their `max_num_seqs` was that of a training step of eight prompts."""
    for max_tokens in (256, 4096):
        config = config_of(SEVEN, algorithm="eval", num_samples=1, max_tokens=max_tokens)
        assert plan(config, ONE_24, tmp_path, trains=False).engines[0].max_num_seqs == 256
    numbers = {"num_policy": 2, "num_engines": 2}
    on_cores = Site(RunFolder(tmp_path), ONE_RANK, Machine((0, 1), ()))
    assert max_sequences(config, on_cores, "rollout", **numbers) == 32
    chosen = config_of(SEVEN, algorithm="eval", engine={"args": {"max_num_seqs": 12}})
    assert max_sequences(chosen, on_cores, "rollout", **numbers) == 12


@pytest.mark.parametrize(("on_gpu", "num_sequences"), [(True, 256), (False, 32)])
def test_a_judge_keeps_up_with_the_policys_engines(on_gpu: bool, num_sequences: int) -> None:
    """On a GPU it read and wrote 32 answers at once, where the policy's engine wrote 256."""
    config = config_of(THREE, judge=THREE, prompts_per_step=64)
    devices = ("0",) if on_gpu else ()
    site = Site(RunFolder(Path("/tmp/run")), ONE_RANK, Machine((0,), devices))
    assert max_sequences(config, site, "judge", num_policy=1, num_engines=1) == num_sequences
