"""From `processes` and `accelerate` to ranks, machines and accelerate's config, or to one line that says why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from ycore.config.schema import RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.launch import layout
from ycore.launch.gpus import Gpu
from ycore.launch.layout import NAMES, ONE_RANK, Dtype, Name, accelerate_config, check_bfloat16, layout_of

FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 4
machine_rank: ${NODE}
main_process_ip: $MAIN
main_process_port: 29500
"""


def config(**settings: Any) -> RunConfig:
    settings = {"dtype": "float32", **settings}
    return RunConfig(model="m", dataset="d", rewards=[RewardConfig(reward="exact_answer")], output="o", **settings)


def written(folder: Path, text: str) -> str:
    (folder / "nodes.yaml").write_text(text)
    return str(folder / "nodes.yaml")


def test_one_process_needs_no_launcher() -> None:
    assert layout_of(config(), on_cpu=True) is ONE_RANK
    assert (ONE_RANK.world, ONE_RANK.local, ONE_RANK.shards_weights) == (1, 1, False)


def test_several_processes_are_ddp_unless_told() -> None:
    found = layout_of(config(processes=2), on_cpu=True)
    assert (found.world, found.local, found.shards_weights) == (2, 2, False)
    assert found.accelerate is not None and found.accelerate["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize(("name", "shards"), [("zero1", False), ("zero2", False), ("zero3", True), ("fsdp2", True)])
def test_only_zero3_and_fsdp_leave_no_rank_the_whole_policy(name: str, shards: bool) -> None:
    assert layout_of(config(processes=2, accelerate=name), on_cpu=False).shards_weights is shards


def test_a_file_serves_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "1")
    monkeypatch.setenv("MAIN", "10.0.0.1")
    found = layout_of(config(accelerate=written(tmp_path, FILE)), on_cpu=False)
    assert (found.world, found.local, found.num_machines, found.machine_rank) == (4, 2, 2, 1)
    assert found.accelerate is not None
    assert (found.accelerate["main_process_ip"], found.accelerate["mixed_precision"]) == ("10.0.0.1", "no")


BAD = [
    (FILE.replace("$MAIN", "$NOT_SET_ANYWHERE"), "names the environment variable NOT_SET_ANYWHERE, which is not set"),
    (FILE + "mixed_precision: bf16\n", "mixed_precision is 'bf16', and the run computes in float32"),
    (FILE.replace("num_processes: 4", "num_processes: 3"), "num_processes must be a multiple of num_machines"),
    (FILE.replace("num_processes: 4", "num_processes: many"), "num_processes is a whole number, 1 or more"),
    (FILE.replace("main_process_port: 29500", ""), "several machines meet at main_process_ip and main_process_port"),
    (FILE.replace("MULTI_GPU", "DEEPSPEED"), "deepspeed_multinode_launcher must be 'standard'"),
    ("steps: 3\n", "no accelerate config: it has no distributed_type"),
    ("a: [\n", "is not YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_a_file_that_cannot_work(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "0")
    monkeypatch.setenv("MAIN", "10.0.0.1")
    with pytest.raises(ConfigError, match=message):
        layout_of(config(accelerate=written(tmp_path, text)), on_cpu=False)


def test_a_bare_no_is_no_mixed_precision(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nmixed_precision: no\n"
    found = layout_of(config(accelerate=written(tmp_path, text)), on_cpu=True)
    assert found.accelerate is not None and found.accelerate["mixed_precision"] == "no"


def test_processes_that_contradict_the_file(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
    with pytest.raises(ConfigError, match=r"--processes 4 is not what .* says: 2 processes on 1 machine"):
        layout_of(config(processes=4, accelerate=written(tmp_path, text)), on_cpu=True)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="there is no file 'zero-3'; did you mean 'zero3'"):
        layout_of(config(accelerate="zero-3"), on_cpu=True)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"DeepSpeed is not installed; pip install 'ycore\[deepspeed\]'"):
        layout_of(config(processes=2, accelerate="zero2"), on_cpu=True)


KINDS = {
    "ddp": DistributedType.MULTI_GPU,
    "zero1": DistributedType.DEEPSPEED,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "fsdp2": DistributedType.FSDP,
}


def read_back(told: dict[str, Any], folder: Path) -> Any:
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(told))
    return load_config_from_file(str(folder / "accelerate.yaml"))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_it(name: Name, dtype: Dtype, on_cpu: bool, tmp_path: Path) -> None:
    if name == "fsdp2" and on_cpu:
        with pytest.raises(ConfigError, match=r"fsdp2 needs GPUs.*zero3"):
            accelerate_config(name, processes=2, on_cpu=True, dtype=dtype)
        return
    seen = read_back(accelerate_config(name, processes=2, on_cpu=on_cpu, dtype=dtype), tmp_path)
    assert seen.distributed_type == KINDS[name]
    assert (seen.num_processes, seen.num_machines, seen.use_cpu) == (2, 1, on_cpu)
    assert seen.mixed_precision == ("bf16" if dtype == "bfloat16" else "no")
    assert seen.main_process_port == 0, "a free port, so that two runs do not meet"
    if name.startswith("zero"):
        assert seen.deepspeed_config["zero_stage"] == int(name[-1])
        assert seen.deepspeed_config["zero3_init_flag"] is (name == "zero3")


def test_a_device_without_bfloat16_is_refused() -> None:
    old = Gpu("1", "GPU-b", "Tesla T4", "535.129.03", 15.0, 14.0, (7, 5))
    with pytest.raises(ConfigError, match=r"device 1 \(Tesla T4\) has none; train with --set dtype=float32"):
        check_bfloat16([replace(old, id="0", capability=(8, 0)), old])
    check_bfloat16([replace(old, capability=None)])
