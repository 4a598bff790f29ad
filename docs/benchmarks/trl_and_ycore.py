"""`trl grpo` and `ycore grpo` in turn, on the same model, prompts, batch and seed: how fast, and where the time goes.

    python docs/benchmarks/trl_and_ycore.py --tokens 16 --tokens 128 --repeats 3 --steps 4 --output runs/benchmark

Every run is a separate process (`contestants` has the command lines, `trl_probe` the clocks inside TRL). Before the
runs, several sizes of TRL's micro-batch are tried and the fastest is kept. After them, the passes of `bare` are timed
on the lengths of a round that ycore ran. The figures are written to `results.json` in the output folder as they are
measured, and the tables are printed.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bounded import RunFailed, Stopped, run_bounded
from contestants import (
    HERE,
    Settings,
    Step,
    environment,
    round_lengths,
    trl_command,
    trl_steps,
    ycore_command,
    ycore_steps,
)
from machine import busy_share, describe_machine
from prompts import KINDS, write_prompts
from report import as_markdown, counted, side, summarise

_QUIET = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """The options that were typed. `steps` are by the limit on tokens."""

    model: str
    steps: Mapping[int, int]
    repeats: int
    num_prompts: int
    about: str
    group_size: int
    seed: int
    dtype: str
    learning_rate: float
    engine: str
    trl_batch_sizes: tuple[int, ...]
    bare_batch_sizes: tuple[int, ...]
    output: Path
    timeout_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    plan = parse(arguments)
    if plan.output.exists() and any(plan.output.iterdir()):
        print(
            f"error: --output must be new or empty; {plan.output} is not; choose another",
            file=sys.stderr,
        )
        return 2
    try:
        results = benchmark(plan)
    except RunFailed as problem:
        print(f"failed: {problem}", file=sys.stderr)
        return 1
    except Stopped:
        print("interrupted", file=sys.stderr)
        return 130
    print(as_markdown(results))
    return 0


def parse(arguments: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(
        description="trl grpo and ycore grpo in turn on the same work"
    )
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        help="as `ycore grpo` takes it; it needs a chat template",
    )
    add(
        "--tokens",
        action="append",
        metavar="N[:STEPS]",
        help="limit on a completion's tokens; may be repeated",
    )
    add(
        "--steps",
        type=int,
        default=4,
        help="steps of a run, where --tokens does not say; the first is not counted",
    )
    add("--repeats", type=int, default=3, help="runs of each side")
    add("--prompts", type=int, default=8, help="prompts of a step")
    add("--about", choices=KINDS, default="additions", help="what the prompts ask for")
    add("--group-size", type=int, default=8, help="completions of each prompt")
    add("--seed", type=int, default=0)
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="what both sides compute in",
    )
    add("--learning-rate", type=float, default=1e-5)
    add("--engine", default="auto", help="ycore's engine: auto, vllm or transformers")
    add(
        "--trl-batch-size",
        type=int,
        action="append",
        help="TRL's micro-batch; the fastest of several is kept",
    )
    add(
        "--bare-batch-size",
        type=int,
        action="append",
        help="micro-batches to try for the bare passes",
    )
    add("--output", type=Path, default=Path("runs/benchmark"))
    add("--timeout", type=float, default=900.0, help="seconds that one run may take")
    options = parser.parse_args(arguments)
    levels = [str(level).partition(":") for level in options.tokens or ["16", "128"]]
    return Plan(
        model=options.model,
        steps={int(tokens): int(steps or options.steps) for tokens, _, steps in levels},
        repeats=options.repeats,
        num_prompts=options.prompts,
        about=options.about,
        group_size=options.group_size,
        seed=options.seed,
        dtype=options.dtype,
        learning_rate=options.learning_rate,
        engine=options.engine,
        trl_batch_sizes=tuple(options.trl_batch_size or (8, 16, 32, 64)),
        bare_batch_sizes=tuple(options.bare_batch_size or (4, 8, 16)),
        output=options.output.resolve(),
        timeout_s=options.timeout,
    )


def benchmark(plan: Plan) -> dict[str, Any]:
    """Measure one level after the other, and write the results after each."""
    model = model_folder(plan.model)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "settings": asdict(plan) | {"output": plan.output.name},
        "trl_batch_size": {},
        "trials": {},
        "runs": [],
        "levels": {},
    }
    for max_tokens in plan.steps:
        settings = settings_of(plan, max_tokens, model)
        Level(plan, settings, results, stop).measure()
        (plan.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def model_folder(name: str) -> Path:
    from ycore.models.fetch import fetch_model
    from ycore.models.names import resolve_model

    folder: Path = fetch_model(resolve_model(name))
    return folder.resolve()


def settings_of(plan: Plan, max_tokens: int, model: Path) -> Settings:
    prompts = write_prompts(
        plan.output / f"prompts-{max_tokens}",
        kind=plan.about,
        num_prompts=plan.num_prompts,
        seed=plan.seed,
    )
    return Settings(
        model=model,
        prompts=prompts,
        max_tokens=max_tokens,
        steps=plan.steps[max_tokens],
        num_prompts=plan.num_prompts,
        group_size=plan.group_size,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
        dtype=plan.dtype,
    )


class Level:
    """One limit on tokens: `measure` adds it to `results`."""

    def __init__(
        self, plan: Plan, settings: Settings, results: dict[str, Any], stop: threading.Event
    ) -> None:
        self._plan = plan
        self._stop = stop
        self._settings = settings
        self._results = results
        self._key = str(settings.max_tokens)

    def measure(self) -> None:
        batch_size = self._fastest_batch_size()
        self._results["trl_batch_size"][self._key] = batch_size
        trl, ycore = [], []
        for repeat in range(self._plan.repeats):
            trl.append(self._run_trl(f"trl-{repeat}", self._settings, batch_size))
            ycore.append(self._run_ycore(f"ycore-{repeat}"))
        self._results["levels"][self._key] = summarise(
            trl, ycore, self._bare(f"ycore-{self._plan.repeats // 2}")
        )

    def _fastest_batch_size(self) -> int:
        """Find TRL's fastest micro-batch by one short run each; a size that fails, as for want of memory, is out."""
        sizes = self._plan.trl_batch_sizes
        if len(sizes) == 1:
            return sizes[0]
        # Warming up takes a second or two, which is nothing beside a step of long completions.
        short = replace(self._settings, steps=2 if self._settings.max_tokens < 64 else 1)
        seconds: dict[int, float] = {}
        for size in sizes:
            try:
                seconds[size] = side([self._run_trl(f"trial-{size}", short, size)])["seconds"]
            except RunFailed as problem:
                say(f"micro-batches of {size} are out: {problem}")
        if not seconds:
            raise RunFailed("no micro-batch of TRL works; see above")
        self._results["trials"][self._key] = seconds
        return min(seconds, key=lambda size: seconds[size])

    def _run_trl(self, name: str, settings: Settings, batch_size: int) -> list[Step]:
        folder = self._run(name, trl_command(settings, batch_size=batch_size))
        return self._note(name, trl_steps(folder))

    def _run_ycore(self, name: str) -> list[Step]:
        folder = self._run(name, ycore_command(self._settings, engine=self._plan.engine))
        return self._note(name, ycore_steps(folder))

    def _bare(self, recorded: str) -> dict[str, Any]:
        """Time the bare passes over the last round of a recorded run of ycore."""
        folder = self._folder("bare")
        lengths = round_lengths(self._folder(recorded), step=self._settings.steps - 1)
        order = {
            "model": str(self._settings.model),
            "prompts": str(self._settings.prompts),
            "completions": lengths,
            "batch_sizes": self._plan.bare_batch_sizes,
            "repeats": self._plan.repeats,
            "seed": self._settings.seed,
            "dtype": self._settings.dtype,
            "lora_r": self._settings.lora_r,
            "lora_alpha": self._settings.lora_alpha,
        }
        folder.mkdir(parents=True)
        (folder / "order.json").write_text(json.dumps(order))
        self._run("bare", [sys.executable, str(HERE / "bare.py"), "order.json", "answer.json"])
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        return answer

    def _run(self, name: str, command: Sequence[str]) -> Path:
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        busy = busy_share()
        say(
            f"{self._key} tokens: {name}"
            + (f" (others use {busy:.0%} of the processor)" if busy > _QUIET else "")
        )
        cache = {"HF_DATASETS_CACHE": str(self._plan.output / "datasets")}
        seconds = run_bounded(
            command,
            folder=folder,
            environment=environment() | cache,
            timeout_s=self._plan.timeout_s,
            stop=self._stop,
        )
        run = {
            "tokens": self._settings.max_tokens,
            "name": name,
            "busy_before": busy,
            "wall_s": seconds,
        }
        self._results["runs"].append(run | {"command": list(command)})
        return folder

    def _note(self, name: str, steps: list[Step]) -> list[Step]:
        self._results["runs"][-1]["steps"] = [asdict(step) for step in steps]
        say(
            f"  {name}: "
            + ", ".join(f"{step.seconds:.1f}" for step in steps)
            + f" s; {len(counted(steps))} counted"
        )
        return steps

    def _folder(self, name: str) -> Path:
        return self._plan.output / f"{self._key}-{name}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
