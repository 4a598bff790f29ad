"""From `processes` and `accelerate` to ranks, machines and accelerate's config, or to one line that says why not."""

import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from ycore.config.schema import EngineSettings, RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.launch import layout
from ycore.launch.device_memory import slots_of
from ycore.launch.layout import (
    ONE_RANK,
    Gpu,
    Machine,
    Site,
    accelerate_config,
    check_deepspeed,
    layout_of,
    on_machine,
    planned_site,
)
from ycore.plan.devices import check_bfloat16
from ycore.plan.memory import SHARDINGS, Sharding
from ycore.run.files import RunFolder

CORES = Machine(cores=tuple(range(8)), devices=())
EIGHT = Machine(cores=tuple(range(64)), devices=tuple("01234567"))
TWO = Machine(cores=(0, 1), devices=("4", "0"))
ONE = Machine(cores=(0, 1), devices=("0",))
SLICES = Machine(cores=(0, 1), devices=("MIG-3333", "MIG-4444"))

FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 4
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
"""


def config(**settings: Any) -> RunConfig:
    settings = {"dtype": "float32", **settings}
    return RunConfig(
        model="m",
        dataset="d",
        rewards=[RewardConfig(reward="exact_answer")],
        output="o",
        **settings,
    )


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.2"}.items():
        monkeypatch.setenv(name, value)


def written(folder: Path, text: str) -> str:
    (folder / "nodes.yaml").write_text(text)
    return str(folder / "nodes.yaml")


def test_one_process_needs_no_launcher() -> None:
    assert layout_of(config(), CORES) is ONE_RANK
    assert (ONE_RANK.world, ONE_RANK.local, ONE_RANK.shards_weights) == (1, 1, False)


def test_several_processes_are_ddp_unless_told() -> None:
    run_layout = layout_of(config(processes=2), CORES)
    assert (run_layout.world, run_layout.local, run_layout.shards_weights) == (2, 2, False)
    assert run_layout.accelerate and run_layout.accelerate["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize(
    ("machine", "settings", "processes"),
    [
        (EIGHT, {}, 8),
        (TWO, {"accelerate": "zero2"}, 2),
        (ONE, {}, 1),
        (CORES, {}, 1),
        (SLICES, {}, 1),
        (EIGHT, {"processes": 4}, 4),
        (EIGHT, {"algorithm": "eval"}, 1),
        (EIGHT, {"accelerate": "nodes.yaml"}, "auto"),
    ],
)
def test_every_gpu_is_a_rank_unless_told(
    machine: Machine, settings: dict[str, Any], processes: int | str
) -> None:
    """A file for accelerate has its own number; a process sees one slice of MIG only."""
    assert on_machine(config(**settings), machine).processes == processes


def test_every_rank_sees_the_devices_of_the_ranks_and_no_others(tmp_path: Path) -> None:
    def visible(machine: Machine, **settings: Any) -> str | None:
        site = Site(RunFolder(tmp_path), layout_of(config(**settings), machine), machine)
        return site.trainer_environment.get("CUDA_VISIBLE_DEVICES")

    assert visible(EIGHT) == "0,1,2,3,4,5,6,7" and visible(EIGHT, processes=2) == "0,1"
    assert visible(TWO, processes=1) == "4" and visible(ONE) == "0" and visible(CORES) is None
    assert visible(SLICES) == "MIG-3333"
    assert visible(EIGHT, processes=1, accelerate="zero2") == "0"
    text = "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
    assert visible(EIGHT, accelerate=written(tmp_path, text)) == "0,1"
    assert visible(EIGHT, accelerate=written(tmp_path, text + "gpu_ids: 3,4\n")) is None


def test_engines_may_have_devices_of_their_own() -> None:
    apart = {"engine": EngineSettings(devices=6)}
    site = planned_site(config(**apart), EIGHT)
    assert site.machine.devices == ("0", "1") and site.layout.world == 2
    assert site.engine_machine.devices == tuple("234567")
    assert site.trainer_environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [slot.devices for slot in slots_of(config(**apart), site)] == [
        (device,) for device in "234567"
    ]
    site = planned_site(config(**apart), CORES)
    assert site.rank_cores == [(0, 1)]  # one rank has them too
    assert [slot.cores for slot in slots_of(config(**apart), site)] == [(2, 3, 4), (5, 6, 7)]
    shared = planned_site(config(), EIGHT)
    assert shared.apart is None and shared.engine_machine is shared.machine


@pytest.mark.parametrize(
    ("machine", "count", "message"),
    [
        (EIGHT, 8, "engine.devices 8 leaves none of the 8 devices here to train on; take 7"),
        (CORES, 9, "engine.devices 9 leaves none of the 8 cores here to train on; take 7"),
    ],
)
def test_some_devices_are_left_to_train_on(machine: Machine, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(config(engine=EngineSettings(devices=count)), machine)
    with pytest.raises(ConfigError, match="--processes 4 is more than the 2 devices"):
        layout_of(config(engine=EngineSettings(devices=6), processes=4), EIGHT)


@pytest.mark.parametrize(
    ("machine", "settings", "message"),
    [
        (
            EIGHT,
            {"processes": 9},
            "--processes 9 is more than the 8 devices of this machine, and every process needs one of its own; "
            "take --processes 8",
        ),
        (
            TWO,
            {"processes": 3, "prompts_per_step": 9},
            "more than the 2 devices .*; take --processes 1",
        ),
        (
            CORES,
            {"processes": 64},
            "--processes 64 is more than the 8 cores of this machine.*; take --processes 8",
        ),
        (
            SLICES,
            {"processes": 2},
            "--processes 2 needs whole GPUs: these devices are slices of MIG.*--processes 1",
        ),
    ],
)
def test_more_processes_than_devices(
    machine: Machine, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(config(**settings), machine)


def test_more_processes_in_a_file_than_devices(tmp_path: Path) -> None:
    file = written(tmp_path, "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 4\n")
    with pytest.raises(
        ConfigError,
        match=r"nodes.yaml: 4 processes here is more than the 2 devices.*num_processes: 2",
    ):
        layout_of(config(accelerate=file), TWO)


@pytest.mark.parametrize(
    ("name", "shards"), [("zero1", False), ("zero2", False), ("zero3", True), ("fsdp2", True)]
)
def test_only_zero3_and_fsdp_leave_no_rank_the_whole_policy(name: str, shards: bool) -> None:
    assert layout_of(config(processes=2, accelerate=name), EIGHT).shards_weights is shards


def test_a_file_that_shards_has_the_rules_of_the_sharding(
    tmp_path: Path,
) -> None:
    """Also in `ycore plan`, for machines that are not here."""
    kept = "deepspeed_config_file: none"  # as `accelerate config` writes it
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3, %s}\n"
    )
    file = written(tmp_path, text % kept)
    assert layout_of(config(accelerate=file), EIGHT).shards_weights
    with pytest.raises(ConfigError, match=r"nodes.yaml: --quantize 4bit keeps .* shards it"):
        planned_site(config(accelerate=file, quantize="4bit"), EIGHT)
    file = written(tmp_path, text % "deepspeed_config_file: ds.json")
    with pytest.raises(
        ConfigError, match=r"deepspeed_config_file is 'ds.json'.*say zero_stage"
    ):
        layout_of(config(accelerate=file), EIGHT)


def test_the_environment_says_a_machines_place_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(accelerate=written(tmp_path, FILE))
    assert layout_of(file, EIGHT).machine_rank == 0
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.2"}.items():
        monkeypatch.setenv(name, value)
    run_layout = layout_of(file, EIGHT)
    assert (
        run_layout.world,
        run_layout.local,
        run_layout.num_machines,
        run_layout.machine_rank,
    ) == (4, 2, 2, 1)
    assert run_layout.accelerate
    assert (
        run_layout.accelerate["main_process_ip"],
        run_layout.accelerate["mixed_precision"],
    ) == (
        "10.0.0.2",
        "no",
    )


BAD = [
    (
        FILE + "mixed_precision: bf16\n",
        "mixed_precision is 'bf16', and the run computes in float32",
    ),
    (
        FILE.replace("num_processes: 4", "num_processes: 3"),
        "num_processes must be a multiple of num_machines",
    ),
    (
        FILE.replace("num_processes: 4", "num_processes: many"),
        "num_processes is a whole number, 1 or more",
    ),
    (
        FILE.replace("main_process_port: 29500", ""),
        "several machines meet at main_process_ip and main_process_port",
    ),
    (FILE.replace("MULTI_GPU", "DEEPSPEED"), "deepspeed_multinode_launcher must be 'standard'"),
    ("steps: 3\n", "no accelerate config: it has no distributed_type"),
    ("a: [\n", "not YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_a_file_that_cannot_work(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(config(accelerate=written(tmp_path, text)), EIGHT)


def test_a_bare_no_is_no_mixed_precision(tmp_path: Path) -> None:
    text = (
        "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nmixed_precision: no\n"
    )
    run_layout = layout_of(config(accelerate=written(tmp_path, text)), CORES)
    assert run_layout.accelerate and run_layout.accelerate["mixed_precision"] == "no"


def test_processes_that_contradict_the_file(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
    with pytest.raises(
        ConfigError, match=r"--processes 4 is not what .* says: 2 processes on 1 machine"
    ):
        layout_of(config(processes=4, accelerate=written(tmp_path, text)), CORES)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="there is no file 'zero-3'; did you mean 'zero3'"):
        layout_of(config(accelerate="zero-3"), CORES)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"DeepSpeed is not installed; pip install 'ycore\[deepspeed\]'"
    ):
        check_deepspeed(
            config(accelerate="zero2"),
            layout_of(config(processes=2, accelerate="zero2"), CORES),
        )


KINDS = {
    "ddp": DistributedType.MULTI_GPU,
    "zero1": DistributedType.DEEPSPEED,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "fsdp2": DistributedType.FSDP,
    "hsdp": DistributedType.FSDP,
}


def read_back(settings: dict[str, Any], folder: Path) -> Any:
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    return load_config_from_file(str(folder / "accelerate.yaml"))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_accelerate_reads_it(name: Sharding, dtype: str, on_cpu: bool, tmp_path: Path) -> None:
    settings = accelerate_config(name, processes=4, num_machines=2, on_cpu=on_cpu, dtype=dtype)
    seen = read_back(settings, tmp_path)
    assert seen.distributed_type == KINDS[name]
    assert (seen.num_processes, seen.use_cpu) == (4, on_cpu)
    assert seen.mixed_precision == ("bf16" if dtype == "bfloat16" else "no")
    assert seen.main_process_port == 0, "a free port, so that two runs do not meet"
    if name.startswith("zero"):
        assert seen.deepspeed_config["zero_stage"] == int(name[-1])
        assert seen.deepspeed_config["zero3_init_flag"] is (name == "zero3")
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2} if name == "hsdp" else {}
    assert seen.parallelism_config == {
        f"parallelism_config_{key}": size for key, size in sizes.items()
    }


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_fsdp_is_refused_on_a_cpu(name: str, two_machines: None) -> None:
    with pytest.raises(ConfigError, match=rf"--accelerate {name}: FSDP needs GPUs.*zero3"):
        layout_of(config(processes=2, accelerate=name), CORES)


def test_hsdp_shards_within_machines_and_replicates_between_them(two_machines: None) -> None:
    run_layout = layout_of(config(processes=4, accelerate="hsdp"), EIGHT)
    assert (run_layout.world, run_layout.replicas, run_layout.sharding) == (8, 2, "hsdp")
    assert run_layout.shards_weights


@pytest.mark.parametrize(("processes", "machines"), [(1, "2"), (4, "1")])
def test_hsdp_needs_two_machines_of_two_ranks(
    processes: int, machines: str, two_machines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", machines)
    ranks = processes * int(machines)
    with pytest.raises(ConfigError, match=rf"here are {machines} with {ranks} ranks; .*fsdp2"):
        layout_of(config(processes=processes, accelerate="hsdp"), EIGHT)


HYBRID = """
distributed_type: FSDP
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2}
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
"""


def test_a_file_with_replicas_is_taken_as_it_says(tmp_path: Path) -> None:
    run_layout = layout_of(config(accelerate=written(tmp_path, HYBRID)), EIGHT)
    assert (run_layout.replicas, run_layout.sharding) == (2, "hsdp")


@pytest.mark.parametrize("version", ["", "fsdp_config: {fsdp_version: 1}\n"])
def test_a_file_for_fsdp_of_version_1_is_refused(tmp_path: Path, version: str) -> None:
    """Engines and references get their weights from the shards of version 2; 1 is the default of accelerate."""
    file = written(tmp_path, f"distributed_type: FSDP\nnum_processes: 2\n{version}")
    with pytest.raises(ConfigError, match=r"nodes.yaml: .*say fsdp_version: 2"):
        layout_of(config(accelerate=file), EIGHT)


def test_replicas_times_shards_are_the_processes(tmp_path: Path) -> None:
    file = written(tmp_path, HYBRID.replace("shard_size: 4", "shard_size: 2"))
    with pytest.raises(
        ConfigError, match=r"dp_shard_size must be num_processes, 8; they are 2 and 2"
    ):
        layout_of(config(accelerate=file), EIGHT)


def test_bfloat16_is_refused_on_a_device_without_it_and_auto_is_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Gpu("1", "GPU-b", "Tesla T4", "535.129.03", 15.0, 14.0, (7, 5))
    gpus = [replace(old, id="0", capability=(8, 0), memory_gib=80.0), old]
    monkeypatch.setattr(layout, "visible_gpus", lambda: tuple(gpus))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu130")
    machine = layout.this_machine()
    assert (machine.devices, machine.device_bytes) == (("0", "1"), 15 * 2**30)
    with pytest.raises(
        ConfigError, match=r"device 1 \(Tesla T4\) has none; train with --set dtype=float32"
    ):
        check_bfloat16("bfloat16", machine.without_bfloat16)
    check_bfloat16("auto", machine.without_bfloat16)
    assert on_machine(config(processes=1, dtype="auto"), machine).dtype == "float32"
    gpus[1] = replace(old, capability=None)
    check_bfloat16("bfloat16", layout.this_machine().without_bfloat16)
    assert (
        on_machine(config(processes=1, dtype="auto"), layout.this_machine()).dtype == "bfloat16"
    )


def test_cores_without_bfloat16_compute_in_float32_unless_told() -> None:
    old = replace(CORES, cores_have_bfloat16=False)
    assert (
        on_machine(config(dtype="auto"), CORES).dtype == "bfloat16"
        and on_machine(config(dtype="auto"), old).dtype == "float32"
    )
    assert on_machine(config(dtype="bfloat16"), old).dtype == "bfloat16"
    assert (
        layout_of(config(accelerate="zero2", processes=2, dtype="auto"), old).accelerate or {}
    )["mixed_precision"] == "no"


PLAIN = "distributed_type: {kind}\nnum_processes: 2\nuse_cpu: {cpu}\nfsdp_config: {{fsdp_version: 2}}\n"


@pytest.mark.parametrize(
    ("text", "machine", "why"),
    [
        (PLAIN.format(kind="FSDP", cpu="true"), CORES, r"nodes.yaml: FSDP needs GPUs.*zero3"),
        (
            PLAIN.format(kind="FSDP", cpu="false")
            + "parallelism_config:\n  parallelism_config_cp_size: 2\n",
            EIGHT,
            r"parallelism_config_cp_size is 2.*say 1.*zero3",
        ),
    ],
)
def test_files_that_trl_cannot_train_with_are_refused(
    tmp_path: Path, text: str, machine: Machine, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        layout_of(config(accelerate=written(tmp_path, text)), machine)


@pytest.mark.parametrize(
    "variables",
    [
        {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"},
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "10.0.0.1",
            "PET_MASTER_PORT": "29511",
        },
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"},
        {
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": "1",
            "SLURM_STEP_NODELIST": "a[1-2]",
            "MASTER_PORT": "29511",
        },
    ],
    ids=["by hand", "kubernetes", "pods", "slurm"],
)
@pytest.mark.parametrize("accelerate", [None, "zero3"])
def test_a_machine_finds_its_place_by_itself(
    variables: dict[str, str],
    accelerate: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\ntest $3 = 'a[1-2]' && echo 10.0.0.1 && echo a2\n")
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run_layout = layout_of(config(accelerate=accelerate, prompts_per_step=16), EIGHT)
    assert (
        run_layout.world,
        run_layout.num_machines,
        run_layout.machine_rank,
        run_layout.local,
    ) == (16, 2, 1, 8)
    settings = run_layout.accelerate or {}
    assert (settings["main_process_ip"], settings["main_process_port"]) == ("10.0.0.1", 29511)
    assert settings["num_processes"] == 16
    if accelerate:
        assert settings["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    monkeypatch.setenv("LOCAL_RANK", "0")  # a rank of torchrun's is no machine
    assert layout_of(config(prompts_per_step=16), EIGHT).num_machines == 1


def test_a_slurm_job_with_several_tasks_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_NODES": "2", "NUM_TASKS": "16", "NODELIST": "a[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    with pytest.raises(ConfigError, match=r"once on each machine.*--ntasks-per-node=1"):
        layout_of(config(), EIGHT)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PET_NNODES": "1:2", "PET_NODE_RANK": "0"}, "PET_NNODES must be a whole number; it is '1:2'"),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "tcp://a:1"},
            "MASTER_PORT or PET_MASTER_PORT must be a whole number; it is 'tcp://a:1'",
        ),
        (
            {f"SLURM_STEP_{name}": "2" for name in ("NUM_NODES", "NUM_TASKS", "NODELIST")},
            r"`scontrol show hostnames 2` does not say .*; set MASTER_ADDR",
        ),
    ],
)  # fmt: skip
def test_an_environment_that_says_no_place_is_one_line(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem):
        layout_of(config(), EIGHT)


PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
# `srun` here runs its words once, as the first task; `ycore` stops for a SIGTERM, or ends with $ENDS.
STUBS = {
    "srun": 'echo "srun $*" >> said; export SLURM_PROCID=0; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> said',
    "ycore": 'echo "ycore $*" >> said; trap "exit 130" TERM; mkdir -p runs/first; touch runs/first/run.json started; '
    '[ -n "$ENDS" ] && exit $ENDS; while :; do sleep 0.1; done',
}


def test_the_job_of_the_docs_saves_before_its_limit_and_goes_on(tmp_path: Path) -> None:
    job = re.search(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text("utf-8"), re.S)
    assert (
        job is not None and "--signal=B:USR1@600" in job[1] and "--ntasks-per-node=1" in job[1]
    )
    (tmp_path / "job").write_text(job[1])
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}

    def start(ends: str) -> "subprocess.Popen[bytes]":
        variables = {**environment, "ENDS": ends}
        return subprocess.Popen(["bash", "job"], cwd=tmp_path, env=variables)

    first = start("")
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(60) == 130
    assert [start(ends).wait(60) for ends in ("0", "1", "130")] == [0, 1, 130]
    said = (tmp_path / "said").read_text().splitlines()
    words = [line for line in said if not line.startswith("srun")]
    resumed = "ycore resume runs/first"
    assert words[0].startswith("ycore grpo --recipe mine.yaml")
    assert words[1:] == ["scontrol requeue 7", resumed, resumed, resumed, "scontrol requeue 7"]
