"""Batch arithmetic: what is accepted satisfies TRL's equations, what is refused names the rule and the sizes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.config.resolve import resolve
from ycore.config.schema import RewardConfig, RunConfig, TuneConfig
from ycore.config.trl_arguments import (
    MICRO_BATCH_TOKENS_CPU,
    MICRO_BATCH_TOKENS_GPU,
    TuneBatch,
    derive_batch,
    derive_tune_batch,
)
from ycore.errors import ConfigError


def _config(**keys: object) -> RunConfig:
    rewards = [RewardConfig(reward="exact_answer")]
    return RunConfig.model_validate(
        {"model": "m", "dataset": "d", "rewards": rewards, "output": "o", **keys}
    )


FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
given_size = st.none() | st.integers(1, 40)


@settings(max_examples=300)
@given(
    world_size=st.integers(1, 9),
    prompts=st.integers(1, 70),
    group_size=st.integers(2, 20),
    max_tokens=st.sampled_from([1, 16, 100, 256, 2048, 40_000]),
    fields=st.tuples(given_size, given_size, given_size),
    on_cpu=st.booleans(),
)
def test_accepted_sizes_satisfy_the_equations(
    world_size: int,
    prompts: int,
    group_size: int,
    max_tokens: int,
    fields: tuple[int | None, ...],
    on_cpu: bool,
) -> None:
    trl = {name: value for name, value in zip(FIELDS, fields, strict=True) if value is not None}
    config = _config(
        prompts_per_step=prompts, group_size=group_size, max_tokens=max_tokens, trl=trl
    )
    try:
        plan = derive_batch(config, world_size=world_size, on_cpu=on_cpu)
    except ConfigError as error:
        assert "must be" in str(error) and "\n" not in str(error)
        return
    size = plan.per_device_train_batch_size
    accumulation = plan.gradient_accumulation_steps
    per_generation = plan.steps_per_generation
    assert size * accumulation * world_size == prompts * group_size
    assert size * per_generation % group_size == 0, "whole groups on every rank"
    assert plan.groups_per_rank * group_size == size * per_generation
    assert per_generation % accumulation == 0, "whole optimizer steps in a round"
    for wanted, value in zip(fields, (size, accumulation, per_generation), strict=True):
        assert wanted in (None, value)
    if fields[:2] == (None, None):
        budget = MICRO_BATCH_TOKENS_CPU if on_cpu else MICRO_BATCH_TOKENS_GPU
        assert size == 1 or size * max_tokens <= budget
        assert size % group_size == 0 or group_size % size == 0


@pytest.mark.parametrize(
    ("max_tokens", "on_cpu", "size", "accumulation"),
    [
        (16, True, 64, 1),
        (128, True, 16, 4),
        (256, True, 8, 8),
        (1024, True, 2, 32),
        (4096, True, 1, 64),
        (256, False, 64, 1),
    ],
)
def test_the_micro_batch_is_the_largest_that_fits(
    max_tokens: int, on_cpu: bool, size: int, accumulation: int
) -> None:
    plan = derive_batch(_config(max_tokens=max_tokens), world_size=1, on_cpu=on_cpu)
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (
        size,
        accumulation,
    )
    assert plan.steps_per_generation == accumulation
    assert plan.steps_per_round == 1


def test_a_refusal_says_the_rule_the_values_and_what_works() -> None:
    with pytest.raises(ConfigError) as caught:
        derive_batch(_config(prompts_per_step=7), world_size=4, on_cpu=True)
    assert str(caught.value) == (
        "prompts_per_step must be a multiple of the 4 ranks, for whole groups on each; it is 7; "
        "e.g. 4 or 8"
    )


def test_trl_s_own_fields_are_respected_or_refused_with_what_fits() -> None:
    plan = derive_batch(
        _config(trl={"per_device_train_batch_size": 4}), world_size=2, on_cpu=True
    )
    assert (
        plan.per_device_train_batch_size,
        plan.gradient_accumulation_steps,
        plan.groups_per_rank,
    ) == (4, 8, 4)
    with pytest.raises(
        ConfigError, match=r"they are 9 \* 7 and 8 prompts x 8 / 1 = 64; leave one of the two"
    ):
        derive_batch(_config(trl={"gradient_accumulation_steps": 7}), world_size=1, on_cpu=True)
    with pytest.raises(ConfigError, match=r"are 4 \* 4 and .*= 64"):
        trl = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
        derive_batch(_config(trl=trl), world_size=1, on_cpu=True)


def test_packing_needs_its_steps() -> None:
    """Rows are packed when they are tokens: steps by the number of rows were many epochs more."""
    rows: dict[str, Any] = {"algorithm": "sft", "model": "m", "dataset": "d", "output": "o"}
    config = TuneConfig(**rows, trl={"packing": True})
    with pytest.raises(ConfigError, match=r"--epochs 1 .* --steps N"):
        derive_tune_batch(config, num_rows=1000, world_size=1, on_cpu=True)
    config = config.model_copy(update={"steps": 7})
    assert derive_tune_batch(config, num_rows=1000, world_size=1, on_cpu=True).steps == 7


def test_several_optimizer_steps_a_round() -> None:
    plan = derive_batch(
        _config(max_tokens=256, trl={"steps_per_generation": 16}), world_size=1, on_cpu=True
    )
    assert (plan.steps_per_round, plan.groups_per_rank) == (2, 16)
    assert str(plan).endswith("8 micro-batches of 8, 2 optimizer steps a round")


def test_the_plan_in_words() -> None:
    plan = derive_batch(_config(), world_size=2, on_cpu=True)
    assert (
        str(plan)
        == "8 prompts x 8 completions = 64 a step on 2 ranks: 4 micro-batches of 8 each"
    )


# -- given examples ------------------------------------------------------------------------------------------------


def resolved(method: str = "sft", **keys: Any) -> TuneConfig:
    return resolve(
        options={"algorithm": method, "model": "m", "dataset": "d", "output": "o", **keys}
    )


def sizes(
    config: TuneConfig, *, num_rows: int = 100, world_size: int = 1, on_cpu: bool = True
) -> TuneBatch:
    return derive_tune_batch(config, num_rows=num_rows, world_size=world_size, on_cpu=on_cpu)


def test_a_step_is_split_into_micro_batches_that_fit() -> None:
    batch = sizes(resolved("sft", batch_size=12, trl={"max_length": 512}))
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps) == (4, 3)
    assert (batch.steps, batch.epochs) == (9, 1.08)
    pairs = sizes(resolved("reward", batch_size=12, trl={"max_length": 512}))
    assert pairs.per_device_train_batch_size == 2
    assert "12 rows a step on 1 rank: 6 micro-batches of 2" in str(pairs)
    on_gpu = sizes(resolved("reward", batch_size=12, trl={"max_length": 512}), on_cpu=False)
    assert on_gpu.per_device_train_batch_size == 12


def test_trls_batch_fields_mean_what_they_mean_there() -> None:
    batch = sizes(
        resolved(trl={"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}),
        world_size=2,
    )
    assert (batch.batch_size, batch.steps) == (12, 9)
    assert sizes(resolved(trl={"per_device_train_batch_size": 3})).batch_size == 3


def test_few_rows_make_a_small_batch() -> None:
    assert sizes(resolved(), num_rows=5, world_size=2).batch_size == 4


def test_the_longest_sequence_is_the_contexts_where_that_is_shorter() -> None:
    def batch(**keys: Any) -> TuneBatch:
        return derive_tune_batch(
            resolved(**keys), num_rows=9, world_size=1, on_cpu=True, context_length=512
        )

    assert batch().max_length == 512
    assert batch(trl={"max_length": 64}).max_length == 64
    assert batch(trl={"max_length": None}).max_length is None
    with pytest.raises(
        ConfigError, match=r"context of 512 tokens; it is 900; e\.g\. --max-length 512"
    ):
        batch(trl={"max_length": 900})


SIZES_REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("sft", {"batch_size": 9}, 2, r"multiple of the 2 ranks; it is 9; e.g. 8 or 10"),
    (
        "sft",
        {"batch_size": 200},
        1,
        r"a step takes 200 rows and the dataset has 100 .*--batch-size 100",
    ),
    (
        "sft",
        {"batch_size": 8, "trl": {"per_device_train_batch_size": 3}},
        1,
        r"3 \* 2; leave one .*--batch-size 6",
    ),
    (
        "kto",
        {"trl": {"per_device_train_batch_size": 1}},
        1,
        "kto needs 2 rows or more in a micro-batch",
    ),
]


@pytest.mark.parametrize(("method", "keys", "world_size", "message"), SIZES_REFUSED)
def test_impossible_sizes_name_what_works(
    method: str, keys: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(resolved(method, **keys), world_size=world_size)


def test_ktos_micro_batch_is_never_one() -> None:
    assert sizes(resolved("kto")).per_device_train_batch_size >= 2


@pytest.mark.parametrize("on_cpu", [True, False])
def test_micro_batches_of_pairs_hold_whole_groups(on_cpu: bool) -> None:
    """Also where a group is more than the usual tokens of a micro-batch."""
    options = {"algorithm": "online-dpo", "model": "m", "output": "o", "dataset": "d"}
    options |= {"rewards": ["exact_answer"], "max_tokens": 8192}
    config: Any = resolve(options=options)
    assert derive_batch(config, world_size=1, on_cpu=on_cpu).per_device_train_batch_size == 8
    config = resolve(options={**options, "trl": {"per_device_train_batch_size": 4}})
    with pytest.raises(
        ConfigError, match="it is 4, and a group 8; say --per-device-train-batch-size 8"
    ):
        derive_batch(config, world_size=1, on_cpu=on_cpu)


def test_a_round_of_one_completion_is_refused() -> None:
    """TRL's config takes no groups of one, and the trainer would end with its error."""
    alone = {"prompts_per_step": 1, "group_size": 1}
    with pytest.raises(ConfigError, match="it is 1 prompt x 1 completion"):
        derive_batch(_config(**alone), world_size=1, on_cpu=True)
    derive_batch(_config(**alone, trl={"steps_per_generation": 2}), world_size=1, on_cpu=True)


@pytest.mark.parametrize("algorithm", ["sdft", "sdpo"])
def test_an_epoch_of_self_distillation_is_every_row_with_all_its_completions(
    algorithm: str,
) -> None:
    """One epoch of 12 rows took 2 steps of one row each."""

    def batch(num_rows: int = 12, **keys: Any) -> TuneBatch:
        more = {"reward": "exact_answer"} if algorithm == "sdpo" else {}
        config = resolve(
            options={"algorithm": algorithm, "model": "m", "dataset": "d", **more, **keys}
        )
        assert isinstance(config, TuneConfig)
        return derive_tune_batch(config, num_rows=num_rows, world_size=1, on_cpu=True)

    whole = batch(epochs=1)
    assert (whole.batch_size, whole.steps, whole.epochs) == (8, 12, 1.0)
    assert "1 x 8 completions a step" in str(whole)
    assert batch(epochs=2, num_generations=4).steps == 12
    assert batch(num_rows=3, epochs=1).steps == 3
    with pytest.raises(ConfigError, match=r"num_generations.*--batch-size 8"):
        batch(batch_size=4)
