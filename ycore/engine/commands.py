"""The command line and the environment of every role's engine: one stock vLLM server each.

On a CPU the server is two processes, not vLLM's usual three: with `--distributed-executor-backend uni` and
VLLM_ENABLE_V1_MULTIPROCESSING=0 the worker runs inside the engine core. Starting takes half the processor time (12 s
against 22 s, SmolLM2-135M) and decoding two thirds, because no core spins on a queue between the two; the engine also
holds 0.6 GB less. Its threads are pinned from outside, by the process's affinity. An engine that spans several devices
or cores has a worker process for each (tensor parallelism: Megatron-LM, arXiv 1909.08053), whose threads vLLM pins.

Prefix caching is on, vLLM's default: the completions of a group share their prompt's blocks. On a CPU a block has 32
tokens, since few prompts fill vLLM's 128.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from ycore.engine.vllm_plugin import FORKED, SIGHTED
from ycore.errors import ConfigError
from ycore.models.names import cache_dir
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT, TEACHER
from ycore.run.reports import RUN_MARKER
from ycore.run.secrets import is_secret, redact_text

# Of the user's environment a server gets what is on these lists: nobody can list the names of all secrets. They have
# what servers may need of libraries, compilers, devices, networks and caches. Threads are ycore's to set.
_PATHS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TERM|NO_COLOR|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH"
    r"|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|MAX_JOBS|PYTHON(?:PATH|HOME|HASHSEED|MALLOC)"
    r"|PYTHON(?:NOUSERSITE|USERBASE|WARNINGS)|VIRTUAL_ENV|CONDA_PREFIX|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE"
    r"|HF_(?:HOME|HUB_CACHE|MODULES_CACHE|XET_CACHE)|YCORE_CACHE|XDG_(?:CACHE|CONFIG|DATA|STATE)_HOME|XDG_RUNTIME_DIR"
)
_OTHERS = re.compile(
    r"(?:https?|all|no)_proxy|(?:HTTPS?|ALL|NO)_PROXY|USE_LIBUV|GPU_DEVICE_ORDINAL"
    r"|(?:LC_|CUDA|CUDNN_|CUBLAS|CUTE_|CUTLASS_|NVIDIA_|NVTE_|NVCC|NVRTC_|NCCL_|NVSHMEM_|GLOO_|UCX_|FI_|TORCH|PYTORCH_"
    r"|TRITON_|VLLM_(?!CPU_)|FLASHINFER_|FLASH_|DG_|TVM_|TRANSFORMERS_|TOKENIZERS_|SAFETENSORS_|TIKTOKEN_|MKL_|OPENBLAS_"
    r"|NUMEXPR_|NUMBA_|MALLOC_|TCMALLOC_|HIP_|ROCM|ROCR_|HSA_|AMD_|AITER_|ZE_|ONEAPI_|SYCL_|CCL_|KINETO_)\w*"
)
REPEATABLE = "YCORE_ENGINE_REPEATS"
"""The environment variable of an engine on a CPU whose answers must not depend on its batch."""

_WITH_COUNTERS = ("disable_log_stats", False)
"""The argument of an engine that answers /metrics."""

T = TypeVar("T")
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")

_ROLE_OPTIONS: dict[str, dict[str, str]] = {
    # Logprobs are those of the distribution that was sampled from, and weights can be loaded while the server runs.
    ROLLOUT: {
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "ycore.engine.vllm_extension.PolicyWorker",
        "--middleware": "ycore.engine.vllm_plugin.WeightFiles",
    },
    # Label verdicts are read from the model's own probabilities, whatever the temperature.
    JUDGE: {"--logprobs-mode": "raw_logprobs"},
    # `classify` keeps the classifier's head and the model's own pooling.
    REWARD_MODEL: {"--runner": "pooling", "--convert": "classify"},
    TEACHER: {"--logprobs-mode": "raw_logprobs"},
}

# Arguments of vLLM's on which ycore's protocol, proofs or memory plan rest: what to say in place of `engine.args`.
_SOCKET = "ycore talks to an engine over a socket of its own"
_ONE_ENGINE = "say --set engine.count=2 for more engines, or --set engine.tensor_parallel=2 for wider ones"
_WEIGHTS = "an engine holds the policy's weights as they are sent, which is proved after each sync; leave it out"
_ADAPTERS = (
    "say --set engine.sync=adapter, which sends the policy's adapters without merging them"
)
_ROLE = "ycore sets it by the engine's role; leave it out"

_OWNED: Mapping[str, str] = {
    **dict.fromkeys(
        ("model", "model_weights", "tokenizer", "hf_config_path", "revision"), "say --model"
    ),
    **dict.fromkeys(
        ("host", "port", "uds", "api_key", "root_path", "ssl_keyfile", "ssl_certfile"), _SOCKET
    ),
    **dict.fromkeys(
        (
            "served_model_name",
            "runner",
            "convert",
            "logprobs_mode",
            "worker_extension_cls",
            "worker_cls",
            "generation_config",
            "override_generation_config",
        ),
        _ROLE,
    ),
    **dict.fromkeys(("quantization", "quantization_config", "load_format"), _WEIGHTS),
    **dict.fromkeys(
        ("data_parallel_size", "pipeline_parallel_size", "device_ids"), _ONE_ENGINE
    ),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"), _ADAPTERS
    ),
    "dtype": "say --set dtype=float32",
    "seed": "say --seed",
    "trust_remote_code": "say --trust-remote-code",
    "max_model_len": "say --set engine.max_model_len=4096",
    "tensor_parallel_size": "say --set engine.tensor_parallel=2",
    "gpu_memory_utilization": "say --set engine.gpu_memory_utilization=0.5",
    "kv_cache_memory_bytes": "say --set engine.gpu_memory_utilization=0.5, or engine.memory_gib on a CPU",
    "enable_sleep_mode": "say --set engine.sleep=true",
    "skip_tokenizer_init": "completions are read as text; leave it out",
}


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides how one engine starts. It runs on `cores`, or on `devices`, one a worker."""

    name: str
    model: Path
    socket: Path
    temporary: Path
    run_id: str
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int
    max_num_seqs: int
    seed: int
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    tensor_parallel: int = 1  # workers; on a CPU they share the cores evenly
    memory_gib: int = 1  # size of the KV cache on a CPU, all workers together
    gpu_memory_utilization: float = 0.0  # share of each device
    sleeps: bool = False  # with vLLM's sleep mode; on a device only
    trust_remote_code: bool = False
    role: str = ROLLOUT  # or another of `placement.ROLES`
    has_neighbours: bool = False  # engines of other roles use the same cores or device
    arguments: tuple[
        tuple[str, Any], ...
    ] = ()  # of vLLM, by name, beside those that ycore sets
    variables: tuple[str, ...] = ()  # of the environment, that the user adds to the usual ones
    deterministic: bool = False  # a sequence gets the same in any batch, at a price
    lora_rank: int = 0  # of the policy's adapters, where they are sent alone; 0 where merged
    sees: bool = False  # prompts come with pictures
    host: str = ""  # another machine by its name for ssh, which fetches the model by its name
    model_name: str = ""

    @property
    def is_policy(self) -> bool:
        return self.role == ROLLOUT

    @property
    def on_cpu(self) -> bool:
        return not self.devices


def engine_command(engine: EngineSpec) -> list[str]:
    """Return the server's command line; the server knows its model by the role's name."""
    options: dict[str, object] = {
        "--model": engine.model,
        "--served-model-name": engine.role,
        "--uds": engine.socket,
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--seed": engine.seed,
        "--generation-config": "vllm",  # otherwise the model's own sampling defaults apply
        "--uvicorn-log-level": "warning",
        "--worker-extension-cls": "ycore.engine.vllm_extension.Worker",
        **_ROLE_OPTIONS[engine.role],
    }
    # Counters for /metrics take an eighth of the server's work on an answer, and nobody reads them.
    flags = ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    flags += [] if _WITH_COUNTERS in engine.arguments else ["--disable-log-stats"]
    if engine.tensor_parallel > 1:
        options["--tensor-parallel-size"] = engine.tensor_parallel
    elif engine.on_cpu:
        options["--distributed-executor-backend"] = "uni"
    if engine.lora_rank:
        options |= {
            "--max-lora-rank": engine_rank(engine.lora_rank),
            "--max-loras": 1,
        }
        flags.append("--enable-lora")
    if engine.on_cpu:
        # No chunked prefill: when a prompt is read in parts, vLLM rewinds its seeded generator, which a CPU generator
        # cannot do, and the engine dies. So one pass must hold the longest prompt.
        options["--block-size"] = 32  # tokens; the CPU kernels need a multiple of this
        options["--max-num-batched-tokens"] = max(
            2048, engine.max_model_len
        )  # vLLM's default, or more
        flags += [
            "--no-enable-chunked-prefill",
            "--enforce-eager",
        ]  # the latter: nothing to compile or to warm up
    else:
        options["--gpu-memory-utilization"] = engine.gpu_memory_utilization
        flags += ["--enable-sleep-mode"] if engine.sleeps else []
    if engine.sees and engine.is_policy:
        flags.append("--enable-scale-out")  # the route that takes token ids with pictures
        options["--limit-mm-per-prompt"] = '{"video": 0}'  # no memory is kept for any
    if engine.trust_remote_code:
        flags.append("--trust-remote-code")
    words = [word for option, value in options.items() for word in (option, str(value))]
    words += [
        *flags,
        *argument_words(engine.arguments),
    ]  # of an option that comes twice the last one counts
    return [sys.executable, "-m", "ycore.engine.serve", *words]


ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM allocates (`MaxLoRARanks`)."""


def engine_rank(rank: int) -> int:
    """Return the rank that vLLM allocates for adapters of rank `rank`, which is at most the largest."""
    return next(allocated for allocated in ENGINE_RANKS if allocated >= rank)


def engine_environment(engine: EngineSpec) -> dict[str, str]:
    """Return the server's whole environment: those of our variables that it may need, no secrets, and its own."""
    environment = inherited(os.environ, also=engine.variables)
    environment |= {
        RUN_MARKER: engine.run_id,
        "SPT_NOENV": "1",  # a process title must not overwrite the environment: the run's processes are found by it
        "TMPDIR": str(
            engine.temporary
        ),  # vLLM leaves sockets and rendezvous files behind when it is killed
        "TORCHINDUCTOR_CACHE_DIR": str(
            cache_dir() / "inductor"
        ),  # by default it is lost with TMPDIR every time
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for loading weights and for sleep
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if engine.sees:
        environment[SIGHTED] = "1"
    if engine.lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not engine.on_cpu:
        environment |= {"VLLM_BATCH_INVARIANT": "1"} if engine.deterministic else {}
        return {
            **environment,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(engine.devices),
        }
    if engine.deterministic:
        environment[REPEATABLE] = "1"
    shares = split_evenly(engine.cores or (0,), engine.tensor_parallel)
    num_threads = max(map(len, shares))
    if engine.has_neighbours and num_threads > 1:
        # Waiting threads spin and take the cores from the other engine: two engines of two threads each on two cores
        # take ten times as long together as one after the other. With so short a spin they take as long.
        environment["GOMP_SPINCOUNT"] = "1000"
    if engine.tensor_parallel == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:  # each worker binds its threads by itself; by default vLLM wants a memory node for each
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share)) for share in shares
        )
    return environment | {
        "CUDA_VISIBLE_DEVICES": "",
        FORKED: "1",
        # Of each worker, in GiB; by default vLLM takes a share of all memory.
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(engine.memory_gib / engine.tensor_parallel)),
        "OMP_NUM_THREADS": str(num_threads),
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits for a C++ compiler
        # Threads that share a sequence's keys share them by what else is in the batch, which rounds differently.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    }


def inherited(base: Mapping[str, str], *, also: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of `base` that a server gets.

    A variable of a known family that is named like a secret or has the shape of one is left out (`VLLM_API_KEY`, a
    proxy's password).

    Args:
        also: Further names, or beginnings such as `SLURM_*`, which the user vouches for.
    """
    return {
        name: value
        for name, value in base.items()
        if _may_have(name, value) or any(fnmatchcase(name, pattern) for pattern in also)
    }


def _may_have(name: str, value: str) -> bool:
    if _PATHS.fullmatch(name):
        return True
    is_hidden = (
        name.endswith(_SECRET_ENDINGS) or is_secret(name, value) or redact_text(value) != value
    )
    return _OTHERS.fullmatch(name) is not None and not is_hidden


def split_evenly(items: Sequence[T], count: int) -> list[tuple[T, ...]]:
    """Split the items into `count` runs whose lengths differ by one at most."""
    bounds = [len(items) * share // count for share in range(count + 1)]
    return [tuple(items[bounds[k] : bounds[k + 1]]) for k in range(count)]


def kv_cache_gib(
    model_config: Mapping[str, Any],
    num_tokens: int,
    *,
    bytes_per_value: int = 2,
    tensor_parallel: int = 1,
) -> int:
    """Return the GiB of the keys and values of `num_tokens` tokens, rounded up; ConfigError for a config without sizes.

    Every worker has one KV head at least, where there are fewer of these than workers.
    """
    text = model_config.get("text_config", model_config)
    try:
        num_heads = int(text["num_attention_heads"])
        num_kv_heads = max(int(text.get("num_key_value_heads") or num_heads), tensor_parallel)
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // num_heads)
        values_per_token = 2 * int(text["num_hidden_layers"]) * num_kv_heads * head_dim
    except KeyError as missing:
        rule = "the KV cache's size is derived from the model's config"
        raise ConfigError(f"{rule}, which has no {missing}; set engine.memory_gib") from None
    return max(1, math.ceil(values_per_token * num_tokens * bytes_per_value / 2**30))


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise ConfigError for an argument that ycore sets; vLLM refuses one that it does not have."""
    for name in arguments:
        if "-" in name:
            known = name.replace("-", "_")
            raise ConfigError(
                f"engine.args.{name} must have no hyphens; say engine.args.{known}"
            )
        if name in _OWNED:
            raise ConfigError(f"engine.args.{name} is not passed on: {_OWNED[name]}")


def argument_words(arguments: Iterable[tuple[str, Any]]) -> list[str]:
    """Return words of vLLM's command line: a switch, several words of a list, JSON of a mapping; nothing for None."""
    words: list[str] = []
    for name, value in arguments:
        if (name, value) == _WITH_COUNTERS:  # whose option is left out, as vLLM has none
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif value is not None:
            words += [
                f"--{option}",
                json.dumps(value) if isinstance(value, Mapping) else str(value),
            ]
    return words
