"""Arguments of vLLM's that a user passes through to the policy's engines: `--set engine.args.max_num_seqs=256`.

Those on which ycore's protocol, proofs or memory plan rest are ycore's own, and are refused with what to say instead.
The others are known by vLLM's own list, read from its source, since importing vLLM takes many seconds.
"""

import ast
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, nearest

_SOCKET = "ycore talks to an engine over a socket of its own"
_ONE_ENGINE = "say --set engine.count=2 for more engines, or --set engine.tensor_parallel=2 for wider ones"
_WEIGHTS = "an engine holds the policy's weights as they are sent, which is proved after each sync; leave it out"
_ADAPTERS = "say --set engine.sync=adapter, which sends the policy's adapters without merging them"
_ROLE = "ycore sets it by the engine's role; leave it out"

_OWNED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "hf_config_path", "revision"), "say --model"),
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path", "ssl_keyfile", "ssl_certfile"), _SOCKET),
    **dict.fromkeys(("served_model_name", "runner", "convert", "logprobs_mode", "worker_extension_cls"), _ROLE),
    **dict.fromkeys(("worker_cls", "generation_config", "override_generation_config"), _ROLE),
    **dict.fromkeys(("quantization", "quantization_config", "load_format"), _WEIGHTS),
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size", "device_ids"), _ONE_ENGINE),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"), _ADAPTERS),
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


def check_arguments(arguments: Iterable[str]) -> None:
    """ConfigError for an argument that ycore owns, and for one that the installed vLLM does not have."""
    for name in arguments:
        if name in _OWNED:
            raise ConfigError(f"engine.args.{name} is not passed on: {_OWNED[name]}")
        known = vllm_arguments()
        if known and name not in known:
            hint = nearest(name, known - _OWNED.keys()) or "; names are those of vLLM's EngineArgs, with _"
            raise ConfigError(f"vLLM has no argument {name} (engine.args){hint}")


@cache
def vllm_arguments() -> frozenset[str]:
    """The fields of the installed vLLM's `EngineArgs`; none without vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return frozenset(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )


def words_of(arguments: Iterable[tuple[str, Any]]) -> list[str]:
    """For vLLM's command line: a switch, several words of a list, JSON of a mapping; nothing for None."""
    words: list[str] = []
    for name, value in arguments:
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
