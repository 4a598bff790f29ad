"""The trainer's loss and gradients on a recorded round are those of TRL's own GRPOTrainer on the same round.

Both trainers start from the same weights and see the same tokens, engine log-probabilities and rewards; both take
whole training steps (`training_step`: batch, loss, backward). What must be equal, to 1e-6 in float32:

- the loss and every parameter's gradient, added up over an accumulation window. Micro-batches differ (TRL shuffles
  sequences, ycore deals whole groups by length), but a window is a sum over its sequences, so this does not show.
- where a round feeds several windows (steps_per_generation > gradient_accumulation_steps), which sequence meets which
  window differs too. There the sum over all windows of the round is compared, with the policy moved once, the same
  way in both, after the round was scored: the ratio to the old policy then counts.
- settings that measure a micro-batch against itself (bnpo, entropy terms) are equal only if the micro-batches are: for
  them the seam keeps TRL's own shuffle.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from tests.tiny_model import write_tiny_model
from ycore.trl import packing
from ycore.trl.build import placeholder_rewards
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score, Turn

GROUPS, GROUP_SIZE, MAX_TOKENS = 4, 4, 9
NAMES = ("first", "second")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """One combination: `per_device` completions a micro-batch, and how often the round is used."""

    lora: bool = False
    per_device: int = 8
    accumulation: int = 2
    steps_per_generation: int | None = None
    engine_logprobs: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            "lora" if self.lora else "full",
            f"micro{self.per_device}",
            *map(str, self.settings.values()),
        ]
        return "-".join(parts + ([] if self.engine_logprobs else ["own"]))


class Recorded:
    """A RoundSource that gives the same groups whenever it is asked."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.asked: list[tuple[int, int]] = []

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        self.asked.append((step, num_groups))
        return self.groups


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model with larger weights, so that its distributions are far from flat."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def groups(model: Path) -> list[Group]:
    """Draw prompts and completions of unequal lengths, engine log-probabilities off by noise, one of them missing."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    draw = torch.Generator().manual_seed(3)
    made = []
    for index, prompt_length in enumerate((1, 6, 3, 11)):
        prompt_ids = torch.randint(6, 90, (prompt_length,), generator=draw).tolist()
        completions, scores = [], []
        for member in range(GROUP_SIZE):
            length = int(torch.randint(1, MAX_TOKENS + 1, (1,), generator=draw))
            token_ids = torch.randint(6, 90, (length,), generator=draw).tolist()
            ends = length < MAX_TOKENS
            token_ids = [*token_ids[:-1], 2] if ends else token_ids
            logps = true_logprobs(loaded, prompt_ids, token_ids)
            noisy = (logps + 0.25 * torch.randn(length, generator=draw)).tolist()
            if (index, member) == (1, 2):
                noisy[0] = float("nan")
            completions.append(
                Completion(tuple(token_ids), tuple(noisy), "", "stop" if ends else "length", 0)
            )
            first, second = torch.rand(2, generator=draw).tolist()
            masked = (index, member) == (2, 1)
            scores.append(
                (
                    Score(None if masked else first),
                    Score(None if masked or member == 3 else second),
                )
            )
        prompt = Prompt(row=index, content=f"prompt {index}", columns={"answer": str(index)})
        made.append(
            Group(Draw(index, prompt, tuple(prompt_ids)), tuple(completions), tuple(scores))
        )
    return made


@pytest.fixture(scope="module")
def talks(groups: list[Group]) -> list[Group]:
    """Let an environment write some tokens, in the middle or at the end, of all but a group's first completion."""

    def in_turns(completion: Completion, member: int) -> Completion:
        length, logprobs = len(completion.token_ids), list(completion.logprobs or ())
        before = max(1, length // 3)
        answer = min(member, length - before)
        if not answer:
            return completion
        logprobs[before : before + answer] = [0.0] * answer
        sizes = {True: before, False: answer} if before + answer == length else None
        turns = [
            Turn(by_policy, size, ())
            for by_policy, size in (sizes or {True: before, False: answer}).items()
        ]
        turns += [Turn(True, length - before - answer, ())] if sizes is None else []
        return replace(completion, logprobs=tuple(logprobs), turns=tuple(turns))

    return [
        replace(
            group,
            completions=tuple(
                in_turns(completion, member)
                for member, completion in enumerate(group.completions)
            ),
        )
        for group in groups
    ]


def true_logprobs(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[
            0, len(prompt_ids) - 1 : -1
        ]
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def flat_rows(groups: list[Group]) -> list[dict[str, Any]]:
    """Return the round as TRL's own trainer is told it: a row a completion, what a reward says in a column."""
    return [
        {"prompt": group.draw.prompt.content, "first": first.value, "second": second.value}
        for group in groups
        for first, second in group.scores_GR
    ]


def looks_up(name: str) -> Callable[..., list[float | None]]:
    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        return list(columns[name])

    reward.__name__ = name
    return reward


def build(
    case: Case, model: Path, groups: list[Group], output: Path
) -> tuple[GRPOTrainer, SeamGRPOTrainer]:
    """Build TRL's own trainer, and ours, with the same arguments."""
    arguments = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "seed": 7,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_TOKENS,
        "per_device_train_batch_size": case.per_device,
        "gradient_accumulation_steps": case.accumulation,
        "steps_per_generation": case.steps_per_generation,
        "reward_weights": [1.0, 0.5],
        **case.settings,
    }

    def common() -> dict[str, Any]:
        return {
            "model": str(model),
            "args": GRPOConfig(**arguments),
            "train_dataset": Dataset.from_dict({"prompt": ["tick"] * (GROUPS * GROUP_SIZE)}),
            "processing_class": AutoTokenizer.from_pretrained(model),
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            if case.lora
            else None,
        }

    completions = [completion for group in groups for completion in group.completions]
    logprobs = [list(completion.logprobs or ()) for completion in completions]

    def play_back(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [
                list(group.draw.token_ids) for group in groups for _ in range(GROUP_SIZE)
            ],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": logprobs if case.engine_logprobs else None,
            **(
                {"env_mask": [list(completion.mask) for completion in completions]}
                if any(completion.turns for completion in completions)
                else {}
            ),
        }

    plain = GRPOTrainer(
        reward_funcs=[looks_up(name) for name in NAMES], rollout_func=play_back, **common()
    )
    plain.use_vllm = (
        case.engine_logprobs
    )  # its own correction applies, on log-probabilities that it computes itself
    plain._last_loaded_step = 0
    ours = SeamGRPOTrainer(reward_funcs=placeholder_rewards(NAMES), **common())
    ours.rounds = Recorded(
        groups if case.engine_logprobs else [without_logprobs(group) for group in groups]
    )
    for trainer in (plain, ours):
        trainer.current_gradient_accumulation_steps = case.accumulation
        if case.lora:
            disturb(
                trainer, 0.05, only="lora_B"
            )  # they start at zero, which would hide the gradient of lora_A
    ours._seed_generators = lambda use: None  # TRL's shuffle is seeded here, for both
    return plain, ours


def without_logprobs(group: Group) -> Group:
    silent = [replace(completion, logprobs=None) for completion in group.completions]
    return Group(group.draw, tuple(silent), group.scores_GR)


def disturb(trainer: GRPOTrainer, scale: float, *, only: str = "") -> None:
    """Move the trainable parameters, the same way in every trainer."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and only in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=draw))


def train(
    trainer: GRPOTrainer, rows: list[dict[str, Any]], num_micro_batches: int
) -> tuple[float, dict[str, Any]]:
    """Return summed loss and gradients of that many micro-batches."""
    trainer.model.zero_grad()
    torch.manual_seed(5)  # TRL's shuffle
    loss = sum(
        trainer.training_step(trainer.model, rows, None).item()
        for _ in range(num_micro_batches)
    )
    grads = {
        name: p.grad.clone()
        for name, p in trainer.model.named_parameters()
        if p.grad is not None
    }
    return loss, grads


def difference(
    ours: tuple[float, dict[str, Any]], plain: tuple[float, dict[str, Any]]
) -> float:
    """Return the largest difference in loss and gradients, relative to a loss or a gradient's norm that is above 1."""
    assert ours[1].keys() == plain[1].keys()
    norm = torch.stack([grad.norm() for grad in plain[1].values()]).norm().item()
    assert norm > 1e-3
    gaps = [(ours[1][name] - grad).abs().max().item() for name, grad in plain[1].items()]
    return max(abs(ours[0] - plain[0]) / max(1.0, abs(plain[0])), max(gaps) / max(1.0, norm))


LOSSES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
ONE_WINDOW = [
    Case(
        lora=lora,
        per_device=per_device,
        accumulation=GROUPS * GROUP_SIZE // per_device,
        settings={
            **loss,
            "beta": beta,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.4,
            "vllm_importance_sampling_clip_min": 0.6,
        },
    )
    for (lora, loss, beta, mode), per_device in zip(
        itertools.product((False, True), LOSSES, (0.0, 0.05), MODES),
        itertools.cycle((2, 4, 8)),  # half a group, one group, two groups a micro-batch
        strict=False,
    )
]


@pytest.mark.parametrize("case", ONE_WINDOW, ids=str)
def test_one_window_equals_trl(
    case: Case, model: Path, groups: list[Group], tmp_path: Path
) -> None:
    plain, ours = build(case, model, groups, tmp_path)
    rows = flat_rows(groups)
    expected = train(plain, rows, case.accumulation)
    assert difference(train(ours, rows, case.accumulation), expected) <= TOLERANCE
    assert ours.rounds.asked == [(0, GROUPS)]


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"scale_rewards": "batch"},
    {"scale_rewards": "none", "temperature": 0.7},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"mask_truncated_completions": True},
    {"off_policy_mask_threshold": 0.05},
    {"delta": 1.5, "epsilon_high": 0.28},
    {"vllm_importance_sampling_correction": False},
    {"loss_type": "sapo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    {"beta": 0.05, "use_bias_correction_kl": False},
    {"loss_type": "bnpo"},
    {"top_entropy_quantile": 0.4},
    {"entropy_coef": 0.1},
]


@pytest.mark.parametrize("engine_logprobs", [True, False], ids=["engine", "own"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", OTHER_SETTINGS, ids=str)
def test_other_settings_equal_trl(
    settings: dict[str, Any],
    lora: bool,
    engine_logprobs: bool,
    model: Path,
    groups: list[Group],
    tmp_path: Path,
) -> None:
    case = Case(lora=lora, engine_logprobs=engine_logprobs, settings=settings)
    plain, ours = build(case, model, groups, tmp_path)
    rows = flat_rows(groups)
    expected = train(plain, rows, case.accumulation)
    assert (
        difference(train(ours, rows, case.accumulation), expected) <= TOLERANCE * 2
    )  # some raise ratios to powers


SEVERAL_USES = [
    Case(
        lora=lora,
        per_device=per_device,
        accumulation=accumulation,
        steps_per_generation=steps,
        settings=settings,
    )
    for lora in (False, True)
    for per_device, accumulation, steps in ((8, 1, 2), (4, 2, 4), (4, 1, 4))
    for settings in (
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "grpo", "beta": 0.05},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {
            "loss_type": "cispo",
            "epsilon_high": 5.0,
            "vllm_importance_sampling_mode": "token_mask",
        },
    )
]


@pytest.mark.parametrize("case", SEVERAL_USES, ids=str)
def test_all_windows_of_a_round_equal_trl(
    case: Case, model: Path, groups: list[Group], tmp_path: Path
) -> None:
    plain, ours = build(case, model, groups, tmp_path)
    windows = (case.steps_per_generation or 0) // case.accumulation
    rows, results = flat_rows(groups), []
    for trainer in (plain, ours):
        trainer._prepare_inputs(rows)  # the round is scored by the policy that generated it
        disturb(trainer, 0.01)
        results.append(train(trainer, rows, case.steps_per_generation or 0))
    assert difference(results[1], results[0]) <= TOLERANCE * windows
    kept = [
        torch.cat([batch["old_per_token_logps"] for batch in t._buffered_inputs])
        for t in (plain, ours)
    ]
    assert torch.allclose(*(logps.sum(dim=1).sort().values for logps in kept), atol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", LOSSES, ids=str)
def test_the_second_iteration_over_a_round_equals_trl(
    settings: dict[str, Any], lora: bool, model: Path, groups: list[Group], tmp_path: Path
) -> None:
    case = Case(lora=lora, settings={**settings, "num_iterations": 2})
    plain, ours = build(case, model, groups, tmp_path)
    rows = flat_rows(groups)
    for _ in range(2):
        expected = train(plain, rows, case.accumulation)
        assert difference(train(ours, rows, case.accumulation), expected) <= TOLERANCE
        for trainer in (plain, ours):
            disturb(trainer, 0.02)  # an optimizer step between the two
    assert len(ours.rounds.asked) == 1


TALKS = [
    *ONE_WINDOW[::3],
    *(
        Case(lora=index % 2 > 0, settings=settings)
        for index, settings in enumerate(OTHER_SETTINGS)
    ),
    *(Case(engine_logprobs=False, settings=settings) for settings in OTHER_SETTINGS[::3]),
]


@pytest.mark.parametrize("case", TALKS, ids=str)
def test_completions_in_turns_equal_trl(
    case: Case, model: Path, talks: list[Group], tmp_path: Path
) -> None:
    """TRL is told which tokens are the environment's by `env_mask`, as its own loop of tools marks them."""
    plain, ours = build(case, model, talks, tmp_path)
    rows = flat_rows(talks)
    expected = train(plain, rows, case.accumulation)
    assert difference(train(ours, rows, case.accumulation), expected) <= TOLERANCE * 2
    masks = [
        torch.cat([batch["tool_mask"] for batch in trainer._buffered_inputs])
        for trainer in (plain, ours)
    ]
    assert (
        masks[0].shape == masks[1].shape and 0 < (masks[0] == 0).sum() == (masks[1] == 0).sum()
    )


@pytest.mark.parametrize("case", SEVERAL_USES[::2], ids=str)
def test_several_uses_of_completions_in_turns_equal_trl(
    case: Case, model: Path, talks: list[Group], tmp_path: Path
) -> None:
    plain, ours = build(case, model, talks, tmp_path)
    rows, results = flat_rows(talks), []
    for trainer in (plain, ours):
        trainer._prepare_inputs(rows)
        disturb(trainer, 0.01)
        results.append(train(trainer, rows, case.steps_per_generation or 0))
    assert difference(results[1], results[0]) <= TOLERANCE * (case.steps_per_generation or 0)


@pytest.mark.parametrize("packs", [True, False])
def test_the_gap_and_the_correction_see_the_policys_tokens_alone(
    packs: bool, model: Path, talks: list[Group], tmp_path: Path
) -> None:
    """An engine that is wrong by half a nat about each token of the policy, and has none for the environment's."""
    case = Case(settings={"vllm_importance_sampling_mode": "token_truncate"})
    loaded = AutoModelForCausalLM.from_pretrained(model)

    def wrong(group: Group, completion: Completion) -> Completion:
        logprobs = (
            true_logprobs(loaded, list(group.draw.token_ids), list(completion.token_ids)) + 0.5
        )
        return replace(
            completion, logprobs=tuple((logprobs * torch.tensor(completion.mask)).tolist())
        )

    skewed = [
        replace(
            group,
            completions=tuple(wrong(group, completion) for completion in group.completions),
        )
        for group in talks
    ]
    _, ours = build(case, model, skewed, tmp_path)
    ours.packed_by = ours.packed_by if packs else None
    train(ours, flat_rows(skewed), case.accumulation)
    metrics = ours._metrics["train"]
    assert metrics["ycore/logprob_gap"] == pytest.approx([0.5, 0.5], abs=1e-3)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        [0.6065, 0.6065], abs=1e-3
    )


def test_an_lm_head_in_float32_stays_with_trl(
    model: Path, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the head's dtype shows, so the seam leaves it to TRL; plain TRL cannot do it with an adapter."""
    monkeypatch.setattr(packing, "WIDENED", 0)  # attention in bfloat16, as TRL's
    case = Case(settings={"cast_lm_head_to_fp32": True, "bf16": True})
    ids = torch.randint(6, 90, (4, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, ours = (
            trainer._get_per_token_logps_and_entropies(
                trainer.model.train(), ids, torch.ones_like(ids), 6
            )[0]
            for trainer in build(case, model, groups, tmp_path)
        )
    assert (plain - ours).abs().max() < 1e-4  # 0.003 with a head in bfloat16


def test_a_wrong_logprob_is_seen(model: Path, groups: list[Group], tmp_path: Path) -> None:
    """The comparison can fail: one engine log-probability changed by 0.01 is more than the tolerance."""
    case = Case(settings={"vllm_importance_sampling_mode": "token_truncate"})
    plain, ours = build(case, model, groups, tmp_path)
    first = groups[0].completions[0]
    assert first.logprobs is not None
    changed = Completion(
        first.token_ids, (first.logprobs[0] + 0.01, *first.logprobs[1:]), "", "stop", 0
    )
    group = Group(groups[0].draw, (changed, *groups[0].completions[1:]), groups[0].scores_GR)
    ours.rounds = Recorded([group, *groups[1:]])
    rows = flat_rows(groups)
    assert difference(train(ours, rows, 2), train(plain, rows, 2)) > TOLERANCE
