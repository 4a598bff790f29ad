"""The parts of the device check that train: a replayed round, packed rows, the stages of a sync, three whole steps.

A part takes a folder of its own, returns its figures in words, and raises RunError where something is wrong.
`python -m tests.gpu.training_parts segments 30 8192 16384` measures packed rows: path, layers, tokens of each row.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.trainer.utils import add_fused_lm_head

from tests.chaos.job import Job, write_inputs
from tests.chaos.runs import Run, Setting
from ycore.engine import WeightSource
from ycore.engine.shared_bucket import Bucket
from ycore.engine.weight_proof import tensor_sums
from ycore.engine.weights import copied_to_host, engine_weights, write_weights
from ycore.errors import RunError
from ycore.launch.layout import Gpu, visible_gpus
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.trl.forward import add_compact_head
from ycore.trl.packing import attention_inputs, block_mask, pack, plan_blocks, use_segments

GIB = 2**30
PATHS = ("segments", "varlen", "mask")
ROWS = {True: (30, 2048, 8192, 16384, 32768), False: (2, 1024)}
"""On a device, or on a CPU: layers, then tokens of each row."""
PATH_WITHIN_S = 75
_SMOLLM2: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 65536,
}  # fmt: skip
_BILLION = _SMOLLM2 | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 20,
}  # fmt: skip
_GROUP, _PROMPT_SHARE = (
    8,
    8,
)  # completions of a row's prompt, and which part of the row the prompt is
_MEANS_WITHIN = 0.01  # nats a token, in bfloat16
LARGEST_GAP = 0.1  # nats a token; 0.04 was seen with bfloat16 on both sides
_GROWN_GIB = 1.25  # of the plan
_COMMAND_WITHIN_S = 560.0
_ASK_MEMORY = (
    "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500", "-i",
)  # fmt: skip
_YCORE = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
)
_OPEN = """
import sys, torch
from ycore.engine.shared_bucket import opened
handle, num_bytes, device = sys.argv[1:]
print(len(opened(handle, int(num_bytes), torch.device(device, 0)).clone()))
"""


def device(folder: Path) -> str:
    """Show torch's own view of the device, and compare a product on it with the CPU's."""
    if not torch.cuda.is_available():
        raise RunError(
            f"torch {torch.__version__} sees no device, and the driver lists one; pip install 'ycore[gpu]'"
        )
    properties = torch.cuda.get_device_properties(0)
    torch.manual_seed(0)
    left, right = torch.randn(2, 1024, 1024, dtype=torch.float64)
    gap = 0.0
    for dtype, allowed in ((torch.float32, 1e-2), (torch.bfloat16, 1e-1)):
        product = (left.to("cuda", dtype) @ right.to("cuda", dtype)).cpu().double()
        gap = float((product - left @ right).std() / (left @ right).std())
        if not gap < allowed:
            raise RunError(
                f"a product in {dtype} is {gap:.1e} from the CPU's; {allowed:.0e} is allowed"
            )
    memory = f"{properties.total_memory / GIB:.1f} GiB, compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}, torch {torch.__version__}; a bfloat16 product within {gap:.1e} of the CPU's"


def run_command(words: Sequence[str], output: Path, *, on_cpu: bool = False) -> RunFolder:
    """Run `ycore` with these words to its end and return its folder; RunError with its last line where it fails."""
    environment = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    run = Run(Setting(output.parent, environment=environment), words, output)
    try:
        status = run.wait(timeout_s=_COMMAND_WITHIN_S)
    finally:
        run.end()
    if status != 0:
        raise RunError(f"exit status {status}: {run.tail(1)}")
    return run.folder


def replay_lora(folder: Path) -> str:
    return _replay(folder)


def replay_full(folder: Path) -> str:
    return _replay(folder, "--full", "--beta", "0.05")


def _replay(folder: Path, *options: str) -> str:
    """Train again on rounds recorded on the CPU: losses and gradient norms, in float32."""
    recorded = folder / "recorded"
    again = folder / "again"
    more = ("--set", "lora.dropout=0", "--keep-journal", *options)
    job = Job(write_inputs(folder / "inputs"), engine="transformers", steps=3, more=more)
    before = run_command(job.words(recorded), recorded, on_cpu=True)
    after = run_command(["grpo", "--replay", str(recorded), "--output", str(again)], again)
    steps = list(zip(read_metrics(before.metrics), read_metrics(after.metrics), strict=True))
    loss = max(abs(cpu_row["loss"] - row["loss"]) for cpu_row, row in steps)
    norm = max(abs(cpu_row["grad_norm"] / row["grad_norm"] - 1) for cpu_row, row in steps)
    said = f"{len(steps)} steps, losses within {loss:.1e} and gradient norms within {norm:.1e} of the CPU's"
    if not (loss <= 1e-4 and norm <= 1e-3):
        raise RunError(f"{said}; 1e-4 and 1e-3 are allowed")
    return said


def attention(folder: Path) -> str:
    """Measure forward and backward of packed rows by each path, in a process a path that goes through all lengths."""
    on_device = torch.cuda.is_available()
    figures: dict[int, dict[str, dict[str, float]]] = {}
    words = []
    for path in PATHS if on_device else ("segments", "mask"):
        command = [sys.executable, "-P", "-m", __spec__.name, path, *map(str, ROWS[on_device])]
        measured = folder / f"{path}.jsonl"
        problem = ""
        with measured.open("w") as file, (folder / f"{path}.log").open("w") as log:
            try:
                subprocess.run(
                    command, stdout=file, stderr=log, timeout=PATH_WITHIN_S, check=True
                )
            except subprocess.TimeoutExpired:
                problem = f"no end after {PATH_WITHIN_S} s"
            except (
                subprocess.CalledProcessError
            ):  # e.g. no flash attention, or no room for the mask
                problem = Path(log.name).read_text().strip().rpartition("\n")[2][:80]
        for length_cost in map(json.loads, measured.read_text().splitlines()):
            figures.setdefault(length_cost["tokens"], {})[path] = length_cost
        if problem and path == "segments":
            raise RunError(f"by segments: {problem}")
        words += [f"{path} not to its end ({problem})"] if problem else []
    for tokens, by_path in figures.items():
        costs = [
            f"{path} {path_cost['seconds']:.3f} s {path_cost['gib']:.1f} GiB"
            for path, path_cost in by_path.items()
        ]
        words.append(f"{tokens} tokens: {', '.join(costs)}")
        means = [path_cost["mean_logprob"] for path_cost in by_path.values()]
        if max(means) - min(means) > _MEANS_WITHIN:
            raise RunError(f"{words[-1]}: the mean log-probabilities differ: {means}")
    return "; ".join(words)


def forward_costs(path: str, layers: int, lengths: Sequence[int]) -> Iterator[dict[str, float]]:
    """Measure rows of each length: seconds, the median of three after a warm-up, and GiB above what was held before.

    A row has eight completions of a prompt. SmolLM2-135M's shape with random weights, LoRA, bfloat16, gradient
    checkpointing, and the head that a run uses: TRL's on a device. Flash attention does not share the prompt, so its
    row is longer. `mask`: one dense mask, made on the host, as long as the row in both directions.
    """
    shape = _SMOLLM2 | {"num_hidden_layers": layers}
    policy = _policy("flash_attention_2" if path == "varlen" else "sdpa", shape=shape)
    device, model = policy.device, policy.get_base_model()
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    if device.type == "cpu":
        add_compact_head(model, temperature=1.0)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.enable_input_require_grads()
    policy.train()
    if path == "segments":
        use_segments(model)

    def once(length: int, seed: int) -> float:
        """Draw other tokens at each call; the completions' lengths differ, as a run's do."""
        shared = length // _PROMPT_SHARE
        draw, words = random.Random(seed), range(model.config.vocab_size)
        mean = (length - shared) // _GROUP
        sizes = [mean + mean * place // 20 for place in range(-4, 5) if place]
        prompts = [tuple(draw.choices(words, k=shared + 1))] * _GROUP
        completions = [tuple(draw.choices(words, k=size)) for size in sizes]
        blocks = plan_blocks(prompts, completions, share=path != "varlen")
        row, _ = pack(blocks, prompts, completions, [0, *accumulate(sizes[:-1])])
        masked = path == "mask"
        layout = {"attention_mask": block_mask(blocks[0]).to(device)} if masked else None
        layout = layout or attention_inputs(path, blocks, device)
        inputs = {name: tensor.to(device) for name, tensor in row.items()}
        with torch.autocast(device.type, torch.bfloat16):
            outputs = policy(**inputs, **layout, fused_lm_head=True, use_cache=False)
        outputs.log_probs.sum().backward()
        policy.zero_grad(set_to_none=True)
        return float(outputs.log_probs.detach().sum()) / sum(sizes)  # waits for the device

    for length in lengths:
        once(length, 0)  # kernels are chosen and compiled
        held_bytes, times = _held(reset=True), []
        for repeat in range(1, 4):
            began = time.perf_counter()
            mean = once(length, repeat)
            times.append(time.perf_counter() - began)
        yield {
            "tokens": length,
            "seconds": statistics.median(times),
            "gib": (_held() - held_bytes) / GIB,
            "mean_logprob": mean,
        }


def _held(*, reset: bool = False) -> float:
    """Return bytes: the most so far of the device, or else of this process; with `reset`, those held now."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.max_memory_allocated())
    return float(
        psutil.Process().memory_info().rss
        if reset
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def _policy(attention: str = "sdpa", *, shape: Mapping[str, Any] = _SMOLLM2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
        lora = LoraConfig(
            r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        return get_peft_model(model, lora)


def sync(folder: Path) -> str:
    """Measure GB/s of a sync's stages: of 135M on a CPU, and of 1.3 billion random weights on a device."""
    policy = _policy(shape=_BILLION if torch.cuda.is_available() else _SMOLLM2)
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    target = shared / f"ycore-{RunFolder(folder).run_id}"

    def for_each_weight(work: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        return lambda: [
            work(weight) for _, weight in engine_weights(policy, dtype=torch.bfloat16)
        ]

    def copy(weight: torch.Tensor) -> None:
        _, wait = copied_to_host(weight)
        wait()

    def opened() -> None:
        command = [
            sys.executable,
            "-P",
            "-c",
            _OPEN,
            bucket.handle,
            str(bucket.num_bytes),
            policy.device.type,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode != 0 or int(done.stdout) != bucket.num_bytes:
            raise RunError(
                f"another process cannot open the bucket: {done.stderr.strip().rpartition(chr(10))[2]}"
            )

    stages = {
        "merged and cast": for_each_weight(lambda weight: None),
        "and summed": for_each_weight(tensor_sums),
        "and copied to the host": for_each_weight(copy),
        "all, with four files written": lambda: write_weights(
            policy, target, dtype=torch.bfloat16, version=1
        ),
    }
    num_bytes = sum(weight.nbytes for _, weight in engine_weights(policy, dtype=torch.bfloat16))
    try:
        words = [
            f"{name} {num_bytes / 1e9 / _best(work):.2f} GB/s" for name, work in stages.items()
        ]
        walk = partial(engine_weights, policy, dtype=torch.bfloat16)
        bucket = Bucket(WeightSource(walk, policy.device), {}, target / "bucket")
        words.append(
            f"all, into a bucket {num_bytes / 1e9 / _best(lambda: deque(bucket.fill(), 0)):.2f} GB/s"
        )
        opened()
        words[-1] += ", which another process opened"
    finally:
        for file in target.glob("*"):
            file.unlink()
        target.rmdir()
    return f"{num_bytes / 1e9:.2f} GB: {', '.join(words)}"


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def steps(folder: Path) -> str:
    """Run three steps of the quickstart with its engines, beside the plan, and the gap in log-probability."""
    gpu = next(iter(visible_gpus()), None)
    words = ["grpo", "--recipe", "quickstart", "--steps", "3", "--output", str(folder / "run")]
    with sampled_gib(folder / "used") as used:
        run = run_command(words, folder / "run")
    rows = read_metrics(run.metrics)
    gap = max(row["ycore/logprob_gap"] for row in rows)
    step = sorted(row["ycore/time/step"] for row in rows[1:])[0]
    said = f"a step takes {step:.1f} s; engine and trainer differ by {gap:.3f} nats a token"
    planned = []
    if gpu is not None:
        planned = _on_a_device(gpu, max(used) - used[0], step)
    said += "".join(
        f"; {figure['what']} {figure['measured']:.1f} {figure['unit']}, planned {figure['planned']:.1f}"
        for figure in planned
    )
    memory = [figure for figure in planned if figure["what"].startswith("memory")]
    if gap > LARGEST_GAP or any(
        figure["measured"] > _GROWN_GIB * figure["planned"] for figure in memory
    ):
        raise RunError(
            f"{said}; {LARGEST_GAP} nats and {_GROWN_GIB} times the planned memory are allowed"
        )
    return said


@contextmanager
def sampled_gib(file: Path) -> Iterator[list[float]]:
    """After it the list has the device's used memory, in GiB, as it was every half second; empty without a device."""
    used: list[float] = []
    gpu = next(iter(visible_gpus()), None)
    if gpu is None:
        yield used
        return
    with file.open("w") as output:
        sampling = subprocess.Popen([*_ASK_MEMORY, gpu.id], stdout=output)
    try:
        yield used
    finally:
        sampling.terminate()
        sampling.wait()
        used += [float(line) / 1024 for line in file.read_text().splitlines()]


def _on_a_device(gpu: Gpu, memory: float, step: float) -> list[dict[str, Any]]:
    """Compare the plan's first way for this device with what was measured."""
    words = [
        *_YCORE,
        "plan",
        "--recipe",
        "quickstart",
        "--devices",
        f"1x{gpu.memory_gib or 0:.0f}GB",
        "--json",
    ]
    first = json.loads(
        subprocess.run(words, capture_output=True, text=True, check=True).stdout
    )["fits"][0]
    return [
        {
            "what": "memory",
            "unit": "GiB",
            "measured": memory,
            "planned": first["peak_bytes"] / GIB,
        },
        {
            "what": "time/step",
            "unit": "s",
            "measured": step,
            "planned": first["seconds"]["step"],
        },
    ]


if __name__ == "__main__":
    for cost in forward_costs(sys.argv[1], int(sys.argv[2]), [*map(int, sys.argv[3:])]):
        print(json.dumps(cost), flush=True)
