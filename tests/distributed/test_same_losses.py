"""Real ranks learn from the same rounds what one rank learns, to float32 rounding.

Two under DDP, ZeRO and FSDP2, four under HSDP. FSDP2 and HSDP are accelerate's own, on cores (`fsdp_on_cpu`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from ycore.config.algorithms import find_algorithm
from ycore.config.schema import (
    LoraSettings,
    RewardConfig,
    RunConfig,
)
from ycore.launch.layout import accelerate_config
from ycore.run.metrics import read_metrics

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("recorded_run.py")
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("same")
    mine = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("verify") for item in mine):
        (root / "all-jobs").touch()
    write_tiny_model(root / "model")
    write_tiny_model(root / "teacher", seed=1)
    return root


# What is trained over one rank, and over two by each strategy, in this order.
JOBS: dict[str, dict[str, Any]] = {
    "full": {"beta": 0.1},  # adapters need no reference model of their own
    "lora": {},
    "lora-again": {"gradient_checkpointing": True},
    "ppo": {},
    "distill": {},
    "distill-js": {},
    "online-dpo": {"beta": 0.1},
    "lora-beta": {"beta": 0.1},
}
LEARNERS = ("ppo", "distill", "distill-js", "online-dpo")
# Of these, what the tests need that are not left to `make verify`.
QUICK = {"alone": ("lora", "ppo"), "ddp": ("lora", "ppo"), "zero3": ("full",)}
RUNS = {
    "alone": ("full", "lora", *LEARNERS),
    "ddp": ("full", "lora", *LEARNERS),
    "zero2": ("full", "lora"),
    "zero3": ("full", "lora", "lora-again"),
    "fsdp2": ("full", "lora", "lora-again", "distill", "online-dpo"),
    "hsdp": ("full", "lora"),
    "alone-bfloat16": ("full", "lora", "lora-beta"),
    "fsdp2-bfloat16": ("full", "lora", "lora-beta"),
}


def dtype_of(name: str) -> Any:
    return name.partition("-")[2] or "float32"


def config_of(place: Path, name: str, job: str) -> RunConfig:
    algorithm = job.removesuffix("-js") if job in LEARNERS else "grpo"
    settings: dict[str, Any] = {}
    if algorithm == "distill":
        divergence = "js" if job == "distill-js" else "sampled"
        settings["distill"] = {"divergence": divergence, "beta": 0.3}
    if algorithm == "ppo":
        settings |= {"critic": {"warmup_steps": 1, "lam": 0.9}, "kl_in": "loss"}
    config_class: Any = find_algorithm(algorithm).config
    config: RunConfig = config_class(
        **settings,
        algorithm=algorithm,
        model=str(place / "model"),
        dataset="none",
        rewards=[
            RewardConfig(
                reward=f"teacher:{place / 'teacher'}" if "distill" in job else "made_up"
            )
        ],
        output=str(place / name / job),
        prompts_per_step=4,
        group_size=4,
        max_tokens=9,
        steps=STEPS,
        dtype=dtype_of(name),
        lora=None if job == "full" else LoraSettings(r=4),
        # A large epsilon: where a gradient is nothing but rounding, Adam would make a whole step of its sign.
        trl={
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-3,
            "per_device_train_batch_size": 4,
            **JOBS[job],
        },
    )
    return config


def run(place: Path, name: str, job: str) -> Path:
    """The folder of a job over two ranks by `name`, or over one without accelerate; all jobs of `name` run at once."""
    if (place / name).exists():
        return place / name / job
    jobs = place / f"{name}.json"
    wanted = RUNS[name] if (place / "all-jobs").exists() else QUICK[name]
    jobs.write_text(
        json.dumps(
            [
                config_of(place, name, wanted_job).model_dump(mode="json")
                for wanted_job in wanted
            ]
        )
    )
    launch: list[str] = []
    if not name.startswith("alone"):
        ranks = 4 if name == "hsdp" else 2
        launch_config = accelerate_config(
            name.partition("-")[0],  # type: ignore[arg-type]
            processes=ranks,
            num_machines=ranks // 2,
            on_cpu=True,
            dtype=dtype_of(name),
        )
        (place / f"{name}.yaml").write_text(yaml.safe_dump(launch_config))
        launch = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(place / f"{name}.yaml"),
        ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *launch, str(WORKER), str(jobs)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return place / name / job


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("ddp", "lora"),
        pytest.param("zero3", "full", marks=pytest.mark.verify),
        pytest.param("ddp", "full", marks=pytest.mark.verify),
        pytest.param("zero2", "full", marks=pytest.mark.verify),
        pytest.param("zero2", "lora", marks=pytest.mark.verify),
        pytest.param("zero3", "lora", marks=pytest.mark.verify),
        pytest.param("fsdp2", "full", marks=pytest.mark.verify),
        pytest.param("fsdp2", "lora", marks=pytest.mark.verify),
        pytest.param("hsdp", "full", marks=pytest.mark.verify),
        pytest.param("hsdp", "lora", marks=pytest.mark.verify),
    ],
)
def test_two_ranks_learn_what_one_learns(place: Path, name: str, job: str) -> None:
    one_rank = run(place, "alone", job)
    compare(one_rank, run(place, name, job))
    assert job == "lora" or read_metrics(one_rank / "metrics.jsonl")[-1]["kl"] > 1e-4, (
        "the reference moved with the policy"
    )


@pytest.mark.verify
@pytest.mark.parametrize("job", ["full", "lora", "lora-beta"])
def test_shards_in_bfloat16_learn_about_the_same(place: Path, job: str) -> None:
    """FSDP2 casts what it hands to modules; autocast does not, so the two round at other places."""
    first, second = (
        read_metrics(run(place, name, job) / "metrics.jsonl")
        for name in ("alone-bfloat16", "fsdp2-bfloat16")
    )
    assert len(first) == len(second) == STEPS
    for expected, row in zip(first, second, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=0.1, abs=0.01)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


@pytest.mark.verify
@pytest.mark.parametrize("job", ["distill", "online-dpo"])
def test_other_learners_learn_from_shards_what_they_learn_on_one(place: Path, job: str) -> None:
    compare(run(place, "alone", job), run(place, "fsdp2", job))


@pytest.mark.verify
@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_adapters_are_computed_again_from_their_shards(place: Path, name: str) -> None:
    compare(run(place, "alone", "lora"), run(place, name, "lora-again"))


def compare(one_rank: Path, two_ranks: Path) -> None:
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in (one_rank, two_ranks))
    assert (
        [row["step"] for row in second]
        == [row["step"] for row in first]
        == list(range(1, STEPS + 1))
    )
    for expected, row in zip(first, second, strict=True):
        for key in ("loss", "grad_norm", "reward"):
            assert row[key] == pytest.approx(expected[key], rel=2e-5, abs=2e-6), (
                row["step"],
                key,
            )
    assert same(weights(one_rank / "before"), weights(two_ranks / "before"), atol=0.0), (
        "the engines' first weights differ"
    )
    assert same(weights(one_rank / "after"), weights(two_ranks / "after"), atol=2e-5)
    assert not same(weights(one_rank / "before"), weights(one_rank / "after"), atol=1e-3), (
        "nothing was learned"
    )


@pytest.mark.parametrize(
    "job", ["ppo", *(pytest.param(job, marks=pytest.mark.verify) for job in LEARNERS[1:])]
)
def test_the_other_learners_learn_on_two_ranks_what_they_learn_on_one(
    place: Path, job: str
) -> None:
    """PPO whitens advantages over both ranks' tokens and has two gradients; teachers and pairs are counted on both."""
    one_rank, two_ranks = (run(place, name, job) for name in ("alone", "ddp"))
    compare(one_rank, two_ranks)
    if job == "ppo":
        first, second = (
            read_metrics(folder / "metrics.jsonl") for folder in (one_rank, two_ranks)
        )
        norms = [[row["ycore/critic/grad_norm"] for row in rows] for rows in (first, second)]
        assert norms[1] == pytest.approx(norms[0], rel=2e-5, abs=2e-6)


def same(
    expected: dict[str, torch.Tensor], seen: dict[str, torch.Tensor], *, atol: float
) -> bool:
    assert seen.keys() == expected.keys()
    return all(
        torch.allclose(seen[name], expected[name], rtol=0.0, atol=atol) for name in expected
    )


@pytest.mark.verify
@pytest.mark.parametrize("name", ["zero3", "fsdp2", "hsdp"])
def test_what_is_saved_is_what_the_engines_had(place: Path, name: str) -> None:
    two = run(place, name, "full")
    saved, last = weights(two / "model"), weights(two / "after")
    assert last.keys() <= saved.keys()
    assert same(last, {name: saved[name] for name in last}, atol=0.0)


def test_no_rank_holds_the_prompts_of_another(place: Path) -> None:
    two = run(place, "ddp", "lora")
    reports: list[dict[str, Any]] = [
        json.loads((two / f"rank-{rank}.json").read_text()) for rank in (0, 1)
    ]
    assert [rank["prompts_gathered"] for rank in reports] == [0, 0]
    for rank, mine in enumerate(reports):
        rank_prompts = {
            f"step {step} group {group}" for step in range(STEPS) for group in (rank, rank + 2)
        }
        assert mine["prompts_held"] and set(mine["prompts_held"]) <= rank_prompts
