# ruff: noqa: E402
"""vLLM told that there are two H100: what it makes of command lines, as JSON. `python -m tests.engine.pretended_h100 FILE`.

The file has a JSON object: the words of a command line by what they are for. vLLM's build for CPUs has the CUDA
platform's code, and not its compiled kernels, which no config needs.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class H100(NonNvmlCudaPlatform):  # type: ignore[misc]
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        wanted = (
            capability if isinstance(capability, int) else 10 * capability[0] + capability[1]
        )
        return bool(wanted <= 90)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 * 2**30

    @classmethod
    def device_count(cls) -> int:
        return 2

    @classmethod
    def is_fully_connected(cls, ids: Any) -> bool:
        return False

    def is_cumem_allocator_available(self) -> bool:
        return True

    @classmethod
    def log_warnings(cls) -> None:
        pass


vllm.platforms._current_platform = H100()  # before what takes the platform at its import

import vllm.config.vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser


def config_of(words: list[str]) -> dict[str, Any]:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(arguments)
    engine = AsyncEngineArgs.from_cli_args(arguments)
    made = engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
    return {
        "second runner": bool(made.use_v2_model_runner),
        "asynchronous": bool(made.scheduler_config.async_scheduling),
        "sleeps": bool(made.model_config.enable_sleep_mode),
        "prefixes": bool(made.cache_config.enable_prefix_caching),
        "devices": made.parallel_config.world_size,
        "adapters": made.lora_config is not None,
        "runner": made.model_config.runner_type,
        "dtype": str(made.model_config.dtype),
        "logprobs": str(made.model_config.logprobs_mode),
    }


def main(file: str) -> None:
    vllm.config.vllm.HAS_TRITON = True
    configs: dict[str, Any] = {}
    for purpose, words in json.loads(Path(file).read_text()).items():
        os.environ["VLLM_BATCH_INVARIANT"] = "1" if purpose == "deterministic" else "0"
        try:
            configs[purpose] = config_of(words)
        except Exception as problem:  # noqa: BLE001 other command lines are worth their seconds
            configs[purpose] = f"{type(problem).__name__}: {problem}"
    print(json.dumps(configs))


if __name__ == "__main__":
    main(sys.argv[1])
