"""The rollout role's process: the command and environment of one stock vLLM server. Pure.

The judge role's process: one stock vLLM server that answers chats, beside the slot's rollout engine.

The reward-model role's process: one stock vLLM pooling server with a sequence classifier of one label.

Not here: starting, watching and stopping it (`launch`), and asking it for completions (`vllm_engine`).

On CPU the server is two processes, not vLLM's usual three: with `--distributed-executor-backend uni` and
VLLM_ENABLE_V1_MULTIPROCESSING=0 the worker lives inside the engine core. That start costs about half the processor
time (12 s against 22 s, SmolLM2-135M), decoding about two thirds, because no core spins on a queue between the two,
and the engine holds 0.6 GB less. Its threads are pinned from outside, by the process's own affinity. Prefix caching is
vLLM's default, which is on: the completions of a group share their prompt's work, block by block. Blocks are of 32
tokens on a CPU, where vLLM's 128 would leave most prompts without one.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ycore.engine.judge_engine import SERVED_JUDGE, SERVED_REWARD_MODEL
from ycore.engine.vllm_engine import SERVED_POLICY
from ycore.errors import ConfigError, ModelError
from ycore.models.hub import cache_dir
from ycore.run.reports import RUN_MARKER

_GIB = 2**30
_BATCHED_TOKENS = 2048  # vLLM's own default: tokens of all requests in one pass
_BLOCK = 32  # tokens; its kernels want a multiple of this
_KEPT_OUT_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_KEPT_OUT_PREFIXES = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """One engine, decided: exactly one of `cores` and `device` says where it runs."""

    name: str
    model: Path
    socket: Path
    temporary: Path
    run_id: str
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int
    max_num_seqs: int
    seed: int
    cores: tuple[int, ...] | None = None
    device: str | None = None
    memory_gib: int = 1
    gpu_memory_utilization: float = 0.3
    sleeps: bool = False
    """On a device: it can be told to leave it to others (`sleeping`)."""

    trust_remote_code: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device is None


def engine_command(engine: RolloutEngine) -> list[str]:
    """The server's command line; weights can be loaded anew while it runs, and logprobs are those sampled from."""
    own = {
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "ycore.engine.vllm_extension.PolicyWorker",
    }
    return server_command(engine, served_as=SERVED_POLICY, options=own)


def server_command(engine: RolloutEngine, *, served_as: str, options: Mapping[str, object]) -> list[str]:
    """The command line of a server of any role: what all have in common, and the role's own options."""
    options = {
        "--model": engine.model,
        "--served-model-name": served_as,
        "--uds": engine.socket,
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--seed": engine.seed,
        "--generation-config": "vllm",  # else the model's own sampling defaults would apply unasked
        "--uvicorn-log-level": "warning",
        **options,
    }
    flags = ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    if engine.on_cpu:
        options["--distributed-executor-backend"] = "uni"
        # A prompt is read whole or not yet: of one read in part, vLLM takes back a draw of its seeded generator, which
        # a CPU's generator cannot do, and the engine dies.
        options["--block-size"] = _BLOCK
        options["--max-num-batched-tokens"] = max(_BATCHED_TOKENS, engine.max_model_len)
        flags += ["--no-enable-chunked-prefill", "--enforce-eager"]  # the latter: nothing to compile or to warm up
    else:
        options["--gpu-memory-utilization"] = engine.gpu_memory_utilization
        flags += ["--enable-sleep-mode"] if engine.sleeps else []
    if engine.trust_remote_code:
        flags.append("--trust-remote-code")
    words = [word for option, value in options.items() for word in (option, str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


def engine_environment(
    engine: RolloutEngine, *, base: Mapping[str, str] | None = None, has_neighbours: bool = False
) -> dict[str, str]:
    """The server's whole environment: `base` (this process's, unless told) without secrets, and what it needs.

    `has_neighbours`: engines of other roles are on the same cores or device.
    """
    inherited = {name: value for name, value in (os.environ if base is None else base).items() if _passes(name)}
    common = {
        RUN_MARKER: engine.run_id,
        "SPT_NOENV": "1",  # a process title must not overwrite the environment: the run's processes are found by it
        "TMPDIR": str(engine.temporary),  # vLLM leaves sockets and rendezvous files behind when it is killed
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor"),  # else what is compiled goes with TMPDIR, every time
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights, and those of sleep
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    own = _cpu_environment(engine, has_neighbours) if engine.on_cpu else _gpu_environment(engine)
    return {**inherited, **common, **own}


def kv_cache_gib(model_config: Mapping[str, Any], num_tokens: int, *, bytes_per_value: int = 2) -> int:
    """GiB that the keys and values of `num_tokens` tokens take, rounded up; ConfigError when the config cannot tell."""
    text = model_config.get("text_config", model_config)
    try:
        heads = int(text["num_attention_heads"])
        num_values = (
            2  # a key and a value
            * int(text["num_hidden_layers"])
            * int(text.get("num_key_value_heads") or heads)
            * int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        )
    except KeyError as missing:
        raise ConfigError(
            f"the KV cache's size is derived from the model's config, which has no {missing}; set engine.memory_gib"
        ) from None
    return max(1, math.ceil(num_values * num_tokens * bytes_per_value / _GIB))


def _passes(name: str) -> bool:
    return not name.endswith(_KEPT_OUT_SUFFIXES) and not name.startswith(_KEPT_OUT_PREFIXES)


def _cpu_environment(engine: RolloutEngine, has_neighbours: bool) -> dict[str, str]:
    # Threads that wait for each other spin, and so take the cores from another engine's: two engines with two threads
    # each on two cores take ten times as long at once as in turn. With so short a spin they take as long.
    waiting = {"GOMP_SPINCOUNT": "1000"} if has_neighbours and len(engine.cores or ()) > 1 else {}
    return {
        **waiting,
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(engine.memory_gib),  # else vLLM asks for a share of all memory
        "OMP_NUM_THREADS": str(len(engine.cores or (0,))),
        "TORCHDYNAMO_DISABLE": "1",  # a first request would wait for a C++ compiler, for kernels that count ranks
    }


def _gpu_environment(engine: RolloutEngine) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(engine.device)}


def judge_command(engine: RolloutEngine) -> list[str]:
    """The server's command line; log-probabilities are the model's own, whatever the temperature."""
    return server_command(engine, served_as=SERVED_JUDGE, options={"--logprobs-mode": "raw_logprobs"})


def reward_model_command(engine: RolloutEngine) -> list[str]:
    """The server's command line. `classify` keeps the classifier's head; the model's own pooling stays as it is."""
    return server_command(
        engine, served_as=SERVED_REWARD_MODEL, options={"--runner": "pooling", "--convert": "classify"}
    )


def check_classifier(name: str, config: Mapping[str, Any]) -> None:
    """ModelError unless a model's config.json is that of a sequence classifier with one label."""
    architectures = [str(one) for one in config.get("architectures") or []]
    if not any(one.endswith("ForSequenceClassification") for one in architectures):
        told = ", ".join(architectures) or "none"
        raise ModelError(
            f"rm:{name} must be a sequence classifier with one label (...ForSequenceClassification); its architectures "
            f"are {told}; train one with TRL's RewardTrainer, or ask the model as a judge: --reward judge:FILE.yaml"
        )
    labels = config.get("id2label") or {}
    num_labels = config.get("num_labels") or len(labels) or 2  # transformers' default, where nothing is said
    if num_labels != 1:
        raise ModelError(f"rm:{name} must give one number, and has {num_labels} labels; take a model with num_labels=1")
