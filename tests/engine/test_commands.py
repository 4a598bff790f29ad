"""The command and environment of an engine, and one real engine from start to nothing left."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.engine.commands import (
    REPEATABLE,
    EngineSpec,
    argument_words,
    check_arguments,
    engine_command,
    engine_environment,
    inherited,
    kv_cache_gib,
)
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.server import is_healthy
from ycore.errors import ConfigError
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.launch.processes import ManagedProcess
from ycore.placement.placement import JUDGE, REWARD_MODEL, TEACHER
from ycore.run.files import RunFolder, make_private

CPU = EngineSpec(
    name="rollout-0",
    model=Path("/models/m"),
    socket=Path("/run/rollout-0.sock"),
    temporary=Path("/tmp/ycore-abc"),
    run_id="abc",
    dtype="bfloat16",
    max_model_len=512,
    max_num_seqs=64,
    seed=7,
    cores=(0, 1),
    memory_gib=2,
)


def environment_from(variables: dict[str, str], engine: EngineSpec) -> dict[str, str]:
    """Return the engine's environment where these variables are this process's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", variables)
        return engine_environment(engine)


def test_the_command_on_cpu() -> None:
    assert engine_command(CPU) == [
        *[sys.executable, "-m", "ycore.engine.serve", "--model", "/models/m"],
        *[
            "--served-model-name",
            "rollout",
            "--uds",
            "/run/rollout-0.sock",
            "--dtype",
            "bfloat16",
        ],
        *["--max-model-len", "512", "--max-num-seqs", "64", "--seed", "7"],
        *["--generation-config", "vllm", "--uvicorn-log-level", "warning"],
        *["--worker-extension-cls", "ycore.engine.vllm_extension.PolicyWorker"],
        *["--logprobs-mode", "processed_logprobs"],
        *["--middleware", "ycore.engine.vllm_plugin.WeightFiles"],
        *["--distributed-executor-backend", "uni", "--block-size", "32"],
        *["--max-num-batched-tokens", "2048"],
        *["--disable-uvicorn-access-log", "--no-enable-log-requests", "--disable-log-stats"],
        *["--no-enable-chunked-prefill", "--enforce-eager"],
    ]


def test_the_command_on_a_device() -> None:
    gpu = replace(CPU, cores=(), devices=("3",), gpu_memory_utilization=0.3)
    command = engine_command(gpu)
    assert "--enforce-eager" not in command
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.3"
    assert environment_from({}, gpu)["CUDA_VISIBLE_DEVICES"] == "3"
    assert "OMP_NUM_THREADS" not in environment_from({}, gpu)
    assert "--enable-sleep-mode" not in command
    assert "--enable-sleep-mode" in engine_command(replace(gpu, sleeps=True))
    assert environment_from({}, replace(gpu, sleeps=True)) == environment_from({}, gpu)


def test_what_makes_an_engine_repeat_itself_to_the_bit() -> None:
    """A CPU needs a patch, and no split of keys among threads; a device takes vLLM's own mode where asked."""
    gpu = replace(CPU, cores=(), devices=("3",), gpu_memory_utilization=0.3)
    assert environment_from({}, CPU)["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert "VLLM_BATCH_INVARIANT" not in environment_from({}, gpu)
    assert environment_from({}, replace(gpu, deterministic=True))["VLLM_BATCH_INVARIANT"] == "1"
    on_cpu = environment_from({}, replace(CPU, deterministic=True))
    assert on_cpu[REPEATABLE] == "1" and "VLLM_BATCH_INVARIANT" not in on_cpu
    assert REPEATABLE not in environment_from({}, CPU)


def test_an_engine_that_gets_adapters_has_one_place_for_them() -> None:
    command = engine_command(replace(CPU, lora_rank=24))
    assert "--enable-lora" in command and command[command.index("--max-lora-rank") + 1] == "32"
    assert command[command.index("--max-loras") + 1] == "1"
    assert (
        engine_environment(replace(CPU, lora_rank=24))["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
        == "1"
    )
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment_from({}, CPU)


def test_the_environment_carries_the_marker_and_no_secrets() -> None:
    base = {
        "PATH": "/bin",
        "HF_TOKEN": "canary",
        "WANDB_API_KEY": "canary",
        "OMP_NUM_THREADS": "64",
        "TMPDIR": "/t",
    }
    environment = environment_from(base, CPU)
    assert "canary" not in environment.values()
    assert environment["PATH"] == "/bin"
    expected = {
        "YCORE_RUN": "abc",
        "SPT_NOENV": "1",
        "TMPDIR": "/tmp/ycore-abc",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert {name: environment[name] for name in expected} == expected


# What users of GPUs, clusters and closed networks set.
NEEDED = """
    PATH=/usr/bin HOME=/home/u LANG=C.UTF-8 LC_ALL=C USER=u TZ=UTC
    LD_LIBRARY_PATH=/opt/sk-learn-1-long-enough-0/lib:/usr/local/cuda/lib64 LD_PRELOAD=/lib/libjemalloc.so
    CUDA_HOME=/usr/local/cuda CUDA_PATH=/c CUDA_MODULE_LOADING=LAZY CUDA_DEVICE_ORDER=PCI_BUS_ID
    NVIDIA_VISIBLE_DEVICES=all NCCL_P2P_DISABLE=1 NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=lo TORCH_HOME=/t
    TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCH_CUDA_ARCH_LIST=9.0 TORCH_LOGS=graph
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TRITON_CACHE_DIR=/x TRITON_PTXAS_PATH=/p
    VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_USE_FASTOKENS=1 VLLM_CACHE_ROOT=/v VLLM_LOGGING_LEVEL=DEBUG
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1 FLASHINFER_WORKSPACE_BASE=/f DG_JIT_CACHE_DIR=/d HF_HOME=/hf
    HF_HUB_CACHE=/hf/hub XDG_CACHE_HOME=/c TRANSFORMERS_CACHE=/tr YCORE_CACHE=/y CC=gcc CXX=g++ CPATH=/i
    MAX_JOBS=4 PYTHONPATH=/src VIRTUAL_ENV=/v CONDA_PREFIX=/c https_proxy=http://proxy:3128 NO_PROXY=localhost
    SSL_CERT_FILE=/c.pem HIP_VISIBLE_DEVICES=0 ROCM_PATH=/opt/rocm HSA_OVERRIDE_GFX_VERSION=11.0.0
    MKL_NUM_THREADS=2 MALLOC_ARENA_MAX=2
"""
SECRET = """
    HF_TOKEN=canary TOKEN=canary PGPASSWORD=canary DATABASE_URL=postgres://u:canary@h/d WANDB_API_KEY=canary
    AWS_ACCESS_KEY_ID=canary AWS_SECRET_ACCESS_KEY=canary GITHUB_PAT=canary VLLM_API_KEY=canary
    https_proxy=http://u:canary@proxy:3128 HTTP_PROXY=http://canary@proxy
    NCCL_NOTE=ghp_canarya1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1 MY_COOKIE=canary SLACK_WEBHOOK=canary
    KUBECONFIG=canary SSH_AUTH_SOCK=/canary GOOGLE_APPLICATION_CREDENTIALS=/canary YCORE_SECRETS=canary
    NETRC=canary TORCHINDUCTOR_REDIS_URL=redis://:canary@h HF_HUB_TOKEN=canary HUGGING_FACE_HUB_TOKEN=canary
"""


def variables(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def test_what_a_server_needs_it_gets() -> None:
    assert inherited(variables(NEEDED)) == variables(NEEDED)


@pytest.mark.parametrize(("name", "value"), variables(SECRET).items())
def test_what_is_secret_it_does_not_get(name: str, value: str) -> None:
    assert name not in inherited({**variables(NEEDED), name: value})


def test_threads_are_not_the_users_to_set() -> None:
    assert (
        inherited(
            {"OMP_NUM_THREADS": "64", "KMP_BLOCKTIME": "1", "VLLM_CPU_KVCACHE_SPACE": "9"}
        )
        == {}
    )


def test_what_the_user_names_it_gets() -> None:
    base = {"SLURM_JOB_ID": "1", "SLURMD": "x", "MY_TOKEN": "a", "OTHER": "b"}
    assert inherited(base, also=("SLURM_*", "MY_TOKEN")) == {
        "SLURM_JOB_ID": "1",
        "MY_TOKEN": "a",
    }


def test_threads_wait_with_little_spinning_where_another_engine_wants_their_cores() -> None:
    assert "GOMP_SPINCOUNT" not in environment_from({"GOMP_SPINCOUNT": "7"}, CPU)
    assert environment_from({}, replace(CPU, has_neighbours=True))["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in environment_from(
        {}, replace(CPU, cores=(0,), has_neighbours=True)
    )


def test_kv_cache_follows_the_models_shape() -> None:
    smollm2 = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    per_token = 2 * 30 * 3 * 64 * 2
    assert kv_cache_gib(smollm2, 2**30 // per_token) == 1
    assert kv_cache_gib(smollm2, 2**30 // per_token + 1) == 2
    assert kv_cache_gib(smollm2, 2**30 // per_token, bytes_per_value=4) == 2
    assert kv_cache_gib({"text_config": {**smollm2, "head_dim": 128}}, 2**30 // per_token) == 2


def test_a_config_without_a_shape_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no 'num_attention_heads'; set engine\.memory_gib"):
        kv_cache_gib({"model_type": "odd"}, 1)


@pytest.mark.engine
@pytest.mark.verify
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
def test_a_real_engine_starts_answers_and_leaves_nothing(
    tmp_path: Path, cpu_engine: Any
) -> None:
    from tests.tiny_model import write_tiny_model

    folder = RunFolder(tmp_path / "run")
    engine = cpu_engine(folder, write_tiny_model(tmp_path / "model"), max_num_seqs=4)
    for path in (folder.sockets, engine.temporary):
        make_private(path)
    before = shared_memory_files()
    process = ManagedProcess(
        engine.name,
        engine_command(engine),
        environment=engine_environment(engine),
        run_id=folder.run_id,
        log=tmp_path / "log",
        cores=engine.cores,
    )
    watch = RunWatch(folder.run_id)
    try:
        deadline = time.monotonic() + 600
        while not is_healthy(engine.socket):
            assert process.exit_code is None, process.last_line()
            assert time.monotonic() < deadline, process.last_line()
            time.sleep(0.2)
        living = watch.look()
        assert len(living) >= 2  # the server and its engine core
        # Only a fork has the environment that the server began with: a spawned core gets what vLLM has added since.
        environment = started_with(process.pid)
        assert [
            member.pid
            for member in living
            if member.pid != process.pid and started_with(member.pid) == environment
        ]
        for member in living:  # all but Python's resource tracker, which removes shared memory
            if "resource_tracker" not in " ".join(member.cmdline()):
                member.kill()
        process.wait(timeout_s=20)
    finally:
        watch.kill(grace_s=0)
        remove_leftovers(folder)
    assert RunWatch(folder.run_id).look() == []
    wait_for(lambda: not unused(shared_memory_files() - before))
    assert not folder.sockets.exists()
    assert not engine.temporary.exists()


def started_with(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def shared_memory_files() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if path.is_file()}


def unused(files: set[Path]) -> set[Path]:
    """Return the files that no process has mapped: another engine on this machine keeps its own."""
    mapped: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {
                int(line.split()[4])
                for line in maps.read_text().splitlines()
                if " /dev/shm/" in line
            }
        except OSError:
            continue
    return {path for path in files if path.exists() and path.stat().st_ino not in mapped}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_any_argument_comes_from_a_setting() -> None:
    sets = [
        "engine.args.max_num_seqs=256",
        "engine.args.enable_prefix_caching=false",
        "engine.args.block_size=32",
    ]
    config = resolve(
        recipe={
            "model": "m",
            "dataset": "task:addition",
            "output": "o",
            "rewards": ["exact_answer"],
        },
        sets=sets,
    )
    assert isinstance(config, RunConfig)
    assert config.engine.args == {
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "block_size": 32,
    }


def test_the_words_are_those_of_vllms_command_line() -> None:
    arguments = {
        "max_num_seqs": 256, "enforce_eager": True, "enable_prefix_caching": False, "cudagraph_capture_sizes": [1, 8],
        "speculative_config": {"method": "ngram"}, "swap": None,
    }  # fmt: skip
    assert argument_words(arguments.items()) == [
        *["--max-num-seqs", "256", "--enforce-eager", "--no-enable-prefix-caching"],
        *["--cudagraph-capture-sizes", "1", "8", "--speculative-config", '{"method": "ngram"}'],
    ]


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("host", "ycore talks to an engine over a socket of its own"),
        ("uds", "ycore talks to an engine over a socket of its own"),
        ("model", "say --model"),
        ("served_model_name", "ycore sets it by the engine's role; leave it out"),
        ("seed", "say --seed"),
        ("tensor_parallel_size", "say --set engine.tensor_parallel=2"),
        ("gpu_memory_utilization", "say --set engine.gpu_memory_utilization=0.5"),
        ("quantization", "which is proved after each sync"),
    ],
)
def test_what_ycore_sets_is_refused_with_what_to_say_instead(name: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(["max_num_seqs", name])
    assert str(refused.value).startswith(
        f"engine.args.{name} is not passed on: "
    ) and way_out in str(refused.value)


def test_an_argument_in_the_spelling_of_a_command_line_is_refused_with_its_own() -> None:
    with pytest.raises(ConfigError, match=r"; say engine\.args\.max_model_len$"):
        check_arguments(["max-model-len"])


GPU = replace(CPU, cores=(), devices=("0",), gpu_memory_utilization=0.5, sleeps=True)
ON_A_DEVICE = {
    "policy": GPU,
    "awake": replace(GPU, sleeps=False),
    "deterministic": replace(GPU, deterministic=True),
    "adapters": replace(GPU, lora_rank=16, sleeps=False),
    "float32": replace(GPU, dtype="float32"),
    "two devices": replace(GPU, devices=("0", "1"), tensor_parallel=2),
    "pictures": replace(GPU, sees=True),
    "foreign code": replace(GPU, trust_remote_code=True),
    "drafts": replace(
        GPU,
        arguments=(
            ("speculative_config", {"method": "ngram", "num_speculative_tokens": 4}),
            ("max_num_batched_tokens", 4096),
        ),
    ),
    **{role: replace(GPU, role=role) for role in (JUDGE, REWARD_MODEL, TEACHER)},
}


@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
def test_vllm_on_an_h100_takes_every_command_line(chat_model: Path, tmp_path: Path) -> None:
    """Its CUDA platform is told that there are devices; what it then makes of our words is its own config."""
    commands = {
        purpose: engine_command(replace(engine, model=chat_model))[3:]
        for purpose, engine in ON_A_DEVICE.items()
    }
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    words = [
        sys.executable,
        "-m",
        "tests.engine.pretended_h100",
        str(tmp_path / "commands.json"),
    ]
    made = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-2000:]
    configs = json.loads(made.stdout.splitlines()[-1])
    assert not [config for config in configs.values() if isinstance(config, str)], configs
    # Drafts from earlier tokens need vLLM's first runner, which waits for each step; a pooling model has no next step.
    slower = {purpose for purpose, made in configs.items() if not made["asynchronous"]}
    assert slower == {"drafts", REWARD_MODEL}
    assert not configs["drafts"]["second runner"]
    assert configs["two devices"]["devices"] == 2 and configs["adapters"]["adapters"]
    assert [purpose for purpose in configs if not configs[purpose]["sleeps"]] == [
        "awake",
        "adapters",
    ]
    assert configs["float32"]["dtype"] == "torch.float32"
    assert configs[REWARD_MODEL]["runner"] == "pooling"
    assert configs[JUDGE]["logprobs"] == "raw_logprobs"
