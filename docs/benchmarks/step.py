"""Each part of a step beside the least that this machine could need for it: `python docs/benchmarks/step.py`.

It measures how fast the cores multiply matrices and read memory, runs a few steps of `ycore grpo`, and prints the
seconds of `train`, `round` and `sync`, their limits, how many times its limit each part takes, and how idle the cores
were: work that overlaps with other work can win no more than that. The limits:

    train  Products alone: a token through the layers forward and backward, a completion's tokens through the output
           layer too. A prompt counts once a group. Frozen weights need no gradients of their own (LoRA).
    round  The prompts' products, and for each decode step of an engine the longer of its products and one reading of
           all weights. Each engine has its share of the cores, and no completion waits for a seat.
    sync   The merged weights are written once, and each engine reads and writes them once.

Everything goes to `step.json` in the output folder. With the defaults it takes two minutes on two cores; run it on an
idle machine, for others' work slows the parts and the measured speeds alike, and not by the same factor.
"""

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from bounded import RunFailed, run_bounded
from contestants import (
    Settings,
    environment,
    num_cores,
    read_lines,
    round_lengths,
    ycore_command,
)
from machine import describe_machine
from prompts import KINDS, write_prompts
from trl_and_ycore import model_folder
from watched import MetricsWatch

from ycore.models.model_facts import ModelFacts, facts_of

PARTS = ("train", "round", "sync")
_PRODUCT_SIZE = 2048
_READ_BYTES = 512 * 2**20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Speeds:
    """Operations of products and bytes read, a second, by the cores of a run together."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of a prompt, and of each of its completions."""

    prompt: int
    completions: Sequence[int]


def measure_speeds(dtype: str) -> Speeds:
    """The best of a few products of square matrices, and of a few sums of what no cache holds."""
    import torch

    torch.set_num_threads(num_cores())
    left = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=getattr(torch, dtype))
    memory = torch.ones(_READ_BYTES // 4)
    return Speeds(
        flops=2 * _PRODUCT_SIZE**3 / _fastest(lambda: left @ left),
        bytes_per_s=_READ_BYTES / _fastest(memory.sum),
    )


class IdleCores(MetricsWatch):
    """Watches a run from the end of its first step to that of its last, and says how idle the machine was."""

    def __init__(self, metrics: Path, *, steps: int) -> None:
        super().__init__(metrics)
        self._steps = steps
        self._at: dict[int, Any] = {}

    def see(self, num_steps: int) -> None:
        if num_steps in (1, self._steps):
            self._at.setdefault(num_steps, psutil.cpu_times())

    @property
    def share(self) -> float | None:
        """Idle core seconds over all; None where the run ended before it was seen."""
        if self._at.keys() != {1, self._steps}:
            return None
        before, after = self._at[1], self._at[self._steps]
        idle_s: float = (after.idle + after.iowait) - (before.idle + before.iowait)
        return idle_s / (sum(after) - sum(before))


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest try; the first one warms up and does not count."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def train_limit(facts: ModelFacts, groups: Sequence[Group], speeds: Speeds) -> float:
    """Seconds of the products of one forward and backward pass over adapters: 2 operations a weight and direction."""
    completion_tokens = sum(sum(group.completions) for group in groups)
    tokens = completion_tokens + sum(group.prompt for group in groups)
    products = facts.linear_params * tokens + facts.head_params * completion_tokens
    return 4 * products / speeds.flops


def round_limit(
    facts: ModelFacts,
    groups: Sequence[Group],
    speeds: Speeds,
    *,
    num_engines: int,
    weight_bytes: int,
) -> float:
    """Seconds of the busiest engine, if completions were dealt to engines as evenly as they can be."""
    lengths = sorted((length for group in groups for length in group.completions), reverse=True)
    prompt_tokens = sum(group.prompt for group in groups)
    share = Speeds(speeds.flops / num_engines, speeds.bytes_per_s / num_engines)
    prefill_s = 2 * facts.linear_params * prompt_tokens / speeds.flops
    weights = facts.linear_params + facts.head_params
    read_s = weights * weight_bytes / share.bytes_per_s
    row_s = 2 * weights / share.flops
    alive = Counter(position for length in lengths[::num_engines] for position in range(length))
    return prefill_s + sum(max(read_s, row_s * rows) for rows in alive.values())


def sync_limit(
    facts: ModelFacts, speeds: Speeds, *, num_engines: int, weight_bytes: int
) -> float:
    """Seconds of moving all weights: one copy is written, and every engine makes its own."""
    copies = 1 + 2 * num_engines
    return copies * facts.num_params * weight_bytes / speeds.bytes_per_s


def groups_of(lengths: Sequence[tuple[int, int]], prompts: Mapping[int, int]) -> list[Group]:
    """The groups of a round, from the prompt and the length of each completion, and the tokens of each prompt."""
    return [
        Group(tokens, [length for prompt, length in lengths if prompt == index])
        for index, tokens in prompts.items()
    ]


def compare(
    seconds: Mapping[str, float], limits: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """For each part: its seconds, its limit, and how many times the limit it takes."""
    return {
        part: {
            "seconds": seconds[part],
            "limit": limits[part],
            "times": seconds[part] / limits[part],
        }
        for part in PARTS
    }


def as_table(results: Mapping[str, Any]) -> str:
    speeds = results["speeds"]
    idle = results["idle_cores"]
    lines = [
        f"{speeds['flops'] / 1e9:.0f} billion operations/s, {speeds['bytes_per_s'] / 1e9:.1f} GB/s",
        f"{'part':<8}{'seconds':>9}{'limit':>9}{'times':>8}",
    ]
    for name, part in results["parts"].items():
        lines.append(
            f"{name:<8}{part['seconds']:>9.2f}{part['limit']:>9.2f}{part['times']:>8.1f}"
        )
    lines.append(f"{'step':<8}{results['step']:>9.2f}")
    if idle is not None:
        lines.append(f"the cores were idle for {idle:.0%} of the steps")
    return "\n".join(lines)


def prompt_tokens(model: Path, prompts: Path) -> dict[int, int]:
    """By a prompt's index, its tokens as the chat template writes it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    return {
        row["prompt_index"]: len(
            tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for row in rows
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps, and give what `step.json` has."""
    model = model_folder(arguments.model)
    settings = Settings(
        model=model,
        prompts=write_prompts(
            arguments.output / "prompts",
            kind=arguments.about,
            num_prompts=arguments.prompts,
            seed=0,
        ),
        max_tokens=arguments.tokens,
        steps=arguments.steps,
        num_prompts=arguments.prompts,
        group_size=arguments.group,
        learning_rate=1e-5,
        seed=0,
        dtype=arguments.dtype,
    )
    speeds = measure_speeds(arguments.dtype)
    run = arguments.output / "run"
    with IdleCores(run / "metrics.jsonl", steps=arguments.steps) as idle:
        run_bounded(
            ycore_command(settings, engine=arguments.engine),
            folder=arguments.output,
            environment=environment(),
            timeout_s=arguments.timeout,
            stop=threading.Event(),
        )
    rows = read_lines(run / "metrics.jsonl")[1:]
    seconds = {part: median(row[f"ycore/time/{part}"] for row in rows) for part in PARTS}
    facts = facts_of(json.loads((model / "config.json").read_text()), name=arguments.model)
    lengths = round_lengths(arguments.output, step=arguments.steps - 1)
    groups = groups_of(lengths, prompt_tokens(model, settings.prompts))
    engines = json.loads((run / "engines.json").read_text())["engines"]
    num_engines = max(1, len(engines))  # transformers generates in the trainer
    weight_bytes = 2 if arguments.dtype == "bfloat16" else 4
    limits = {
        "train": train_limit(facts, groups, speeds),
        "round": round_limit(
            facts, groups, speeds, num_engines=num_engines, weight_bytes=weight_bytes
        ),
        "sync": sync_limit(facts, speeds, num_engines=num_engines, weight_bytes=weight_bytes),
    }
    return {
        "machine": describe_machine(),
        "settings": vars(arguments) | {"output": arguments.output.name},
        "speeds": asdict(speeds),
        "idle_cores": idle.share,
        "step": median(row["ycore/time/step"] for row in rows),
        "parts": compare(seconds, limits),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as `ycore grpo` takes it")
    add("--tokens", type=int, default=16, help="limit on a completion's tokens")
    add("--steps", type=int, default=5, help="at least 2: the first is not counted")
    add("--prompts", type=int, default=8, help="of a step")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--about", choices=KINDS, default="additions", help="what the prompts ask for")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--engine", default="auto", help="auto, vllm or transformers")
    add("--timeout", type=float, default=900.0, help="seconds that the run may take")
    add("--output", type=Path, default=Path("runs/step"), help="a new folder")
    parsed = parser.parse_args(arguments)
    parsed.output = parsed.output.resolve()
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    if parsed.steps < 2:
        print(
            f"error: --steps must be at least 2, since the first is not counted; it is {parsed.steps}",
            file=sys.stderr,
        )
        return 2
    if parsed.output.exists():
        print(f"error: --output must be new; {parsed.output} exists", file=sys.stderr)
        return 2
    parsed.output.mkdir(parents=True)
    try:
        results = measure(parsed)
    except RunFailed as problem:
        print(f"failed: {problem}", file=sys.stderr)
        return 1
    (parsed.output / "step.json").write_text(json.dumps(results, indent=2) + "\n")
    print(as_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
