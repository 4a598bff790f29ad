"""Bytes of roles: each part is there when its cause is, and the phases hold what is in memory together."""

from dataclasses import replace

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.plan.devices import DEVICES, GIB, Device, Fleet, bfloat16_factor, processor
from ycore.plan.job import Job, Way, job_of, micro_batch_of
from ycore.plan.memory import activations, engine_weights, largest_weight, trainer_peak, trainer_states
from ycore.plan.model_facts import model_facts
from ycore.plan.phases import forecast

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
SMALL = model_facts("smollm2-135m")
JOB = Job(SMALL, prompts_per_step=4, group_size=4, prompt_tokens=50, completion_tokens=64, max_tokens=64)
WAY = Way(1, 2, "ddp", 16)


def test_gradients_of_an_only_pass_come_as_its_activations_go() -> None:
    full = replace(JOB, lora_rank=None)
    states, peak = trainer_states(full, WAY), trainer_peak(full, WAY)
    assert states["gradients"] == 4 * SMALL.num_params
    assert peak.get("gradients", 0.0) < states["gradients"]
    several = trainer_peak(full, replace(WAY, micro_batch=4))
    assert several["gradients"] == states["gradients"]


def test_a_reference_costs_memory_without_adapters_only() -> None:
    full = replace(JOB, lora_rank=None, has_reference=True)
    assert trainer_states(full, WAY)["reference"] == 2 * SMALL.num_params
    assert "reference" not in trainer_states(replace(JOB, has_reference=True), WAY)


def test_a_mixtures_tokens_pass_through_few_experts() -> None:
    mixture = replace(JOB, policy=model_facts("Qwen3-30B-A3B"))
    dense = replace(JOB, policy=model_facts("Qwen3-32B"))
    assert activations(mixture, WAY)["activations"] < activations(dense, WAY)["activations"]


def test_an_engine_on_a_processor_holds_its_weights_thrice() -> None:
    alone = engine_weights(SMALL, 2, tensor_parallel=1)
    assert engine_weights(SMALL, 2, tensor_parallel=1, on_cpu=True) == 3 * alone
    assert engine_weights(SMALL, 2, tensor_parallel=2) == alone / 2


def test_the_sync_holds_one_whole_weight() -> None:
    assert largest_weight(SMALL) == 4 * SMALL.head_params
    one = forecast(JOB, replace(WAY, slots=1), Fleet(DEVICES["a100"], 1))
    trainer = {phase: roles["trainer"] for phase, roles in one.phases.items()}
    assert trainer["generate"] < trainer["wake-up and sync"] < trainer["train"]
    assert trainer["wake-up and sync"] - trainer["generate"] == largest_weight(SMALL)


def test_processes_add_up_over_ranks_and_engines() -> None:
    one, two = (forecast(JOB, Way(ranks, 2, "ddp", 16 // ranks), Fleet(CORE, 2)) for ranks in (1, 2))
    assert one.phases["all at once"]["rollout"] == two.phases["all at once"]["rollout"]
    assert 1.5 < two.phases["all at once"]["trainer"] / one.phases["all at once"]["trainer"] < 2.2


def run_of(**settings: object) -> RunConfig:
    base = {"model": "smollm2-135m", "dataset": "task:addition", "rewards": ["exact_answer"], **settings}
    config = resolve(recipe=base, sets=(), options={"algorithm": "grpo"})
    assert isinstance(config, RunConfig)
    return config


def test_a_job_is_the_runs_sizes() -> None:
    config = run_of(prompts_per_step=4, group_size=2, max_tokens=32, lora=None, dtype="float32", trl={"beta": 0.1})
    job = job_of(config, SMALL, completion_tokens=100)
    assert (job.prompts_per_step, job.group_size, job.max_tokens, job.completion_tokens) == (4, 2, 32, 32)
    assert (job.lora_rank, job.bytes_per_value, job.has_reference, job.draws) == (None, 4, True, 1.5)
    assert job_of(run_of(sampling={"dynamic": False}), SMALL).draws == 1.0


@pytest.mark.parametrize(("settings", "ranks", "size"), [({}, 1, 8), ({"prompts_per_step": 3}, 2, 1)])
def test_a_micro_batch_is_the_runs_or_one_where_its_sizes_do_not_work(
    settings: dict[str, object], ranks: int, size: int
) -> None:
    assert micro_batch_of(run_of(**settings), ranks=ranks, on_cpu=True) == size


def test_this_processor_is_measured() -> None:
    core = processor()
    assert core.flops > 1e9 and core.bandwidth > 1e8 and core.memory_bytes > 2**30 and core.on_cpu


def test_a_processors_bfloat16_follows_from_its_flags() -> None:
    assert bfloat16_factor({"amx_bf16", "avx512_bf16"}) > bfloat16_factor({"avx512_bf16"}) > bfloat16_factor({"avx2"})
