"""Every named config is one that accelerate itself reads, and says what the run says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from ycore.errors import ConfigError
from ycore.launch.layout import NAMES, Dtype, Name, accelerate_config

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
