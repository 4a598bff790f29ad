"""Build a run's trainer: the algorithm's class with its arguments, model, adapters and data."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase, TrainerCallback

from ycore.advantages import ESTIMATORS, TOKEN_ADVANTAGE, TURN_ADVANTAGE, Estimator
from ycore.config.algorithms import find_algorithm
from ycore.config.batch import derive_batch, derive_tune_batch
from ycore.config.learners import (
    AdvantageConfig,
    DistillConfig,
    GroupConfig,
    OnlineDPOConfig,
    PolicyGradientConfig,
    PPOConfig,
)
from ycore.config.schema import AnyConfig, LoraSettings, RunConfig, TuneConfig
from ycore.config.trl_arguments import trl_arguments
from ycore.data.examples import Example, ExampleSet
from ycore.judge.sources import teacher_of, teachers_of
from ycore.models.fetch import fetch_model
from ycore.models.folder import context_length, read_json
from ycore.models.names import resolve_model
from ycore.rewards.loading import reward_names
from ycore.run.paths import RunFolder
from ycore.scoring.constraints import Constraints
from ycore.trl.base import BaseTrainer, bare
from ycore.trl.forward import add_compact_head, needs_compact_head

EYES = "vision|visual|projector|connector|merger|aligner"
"""In the names of the modules that make features of pictures, in all families that TRL trains."""


def load_trainer_class(config: AnyConfig) -> type[BaseTrainer]:
    """The class of the run's algorithm: `Trainer` of the module that the table of algorithms names."""
    module = importlib.import_module(find_algorithm(config.algorithm).module)
    if isinstance(config, GroupConfig | OnlineDPOConfig):
        trainer: type[BaseTrainer] = module.TRAINERS[config.loss_from]
    else:
        trainer = module.Trainer
    return trainer


def compute_dtype(config: AnyConfig) -> torch.dtype:
    """What the trainer and the policy's engines compute in."""
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def build_trainer(
    config: AnyConfig,
    folder: RunFolder,
    *,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: Sequence[TrainerCallback],
    world_size: int = 1,
    examples: ExampleSet | None = None,
) -> Any:
    """Build the trainer of a run; one with rollouts still needs its `rounds`.

    Args:
        model: the folder of the weights that training begins with.
        world_size: ranks of the run, over all machines.
        examples: the rows of a run without rollouts.
    """
    trainer_class = load_trainer_class(config)
    if isinstance(config, RunConfig):
        arguments, data = _for_rollouts(config, folder, world_size, model)
    else:
        assert examples is not None
        arguments, data = _for_examples(config, folder, world_size, model, examples)
    # Frozen weights are stored in the dtype they are computed with; weights in training are stored in float32.
    stored = torch.float32 if config.lora is None else compute_dtype(config)
    arguments["model_init_kwargs"] = {"dtype": stored, **(arguments.get("model_init_kwargs") or {})}
    if config.quantize is not None:
        data["quantization_config"] = _quantization(compute_dtype(config))
    settings: Any = trainer_class.config_class(**arguments)
    if isinstance(config, RunConfig):
        settings.num_generations = (
            config.group_size
        )  # TRL's class takes no groups of one, and its trainer does
    trainer = trainer_class(
        model=str(model),
        args=settings,
        processing_class=tokenizer,
        peft_config=None
        if config.lora is None
        else _lora(config.lora, trainer_class.task_type, model),
        callbacks=list(callbacks),
        **data,
    )
    if (
        examples is not None or config.quantize is not None
    ):  # TRL makes adapters of a quantised base bfloat16
        _store_trained_in_float32(trainer.model)
    if (
        examples is not None
        and trainer_class.task_type == "CAUSAL_LM"
        and needs_compact_head(trainer)
    ):
        _add_compact_heads(trainer)
    return trainer


def _add_compact_heads(trainer: Any) -> None:
    """For the policy and the reference. WPO's weights (`use_weighting`) need what only TRL's head computes."""
    models = (trainer.model, getattr(trainer, "ref_model", None))
    for model in models if not getattr(trainer, "use_weighting", False) else ():
        if model is not None:
            add_compact_head(
                bare(trainer.accelerator.unwrap_model(model)), temperature=1.0, with_logits=True
            )


def _for_rollouts(
    config: RunConfig, folder: RunFolder, world_size: int, model: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of TRL's config, and what the trainer learns from."""
    batch = derive_batch(config, world_size=world_size, on_cpu=not torch.cuda.is_available())
    arguments = trl_arguments(config, batch, folder)
    arguments["reward_weights"] = [reward.weight for reward in config.rewards]
    rows_per_round = batch.per_device_train_batch_size * batch.steps_per_generation * world_size
    if config.group_size == 1:
        arguments["num_generations"] = max(2, rows_per_round)
    data = {
        "reward_funcs": placeholder_rewards(reward_names(config.rewards)),
        "constraints": Constraints.of(config),
        # The round draws the prompts; the rows of TRL's loader only say that a round is due.
        "train_dataset": Dataset.from_dict({"prompt": ["tick"] * rows_per_round}),
        "advantage": _estimator(config),
    }
    if isinstance(config, PolicyGradientConfig):
        data |= {
            "divergence": config.divergence,
            "trust_region": config.trust_region,
            "loss_average": config.loss_average,
        }
    if isinstance(config, AdvantageConfig):
        data |= {"by_token": config.advantage == TOKEN_ADVANTAGE, "by_turn": config.pays_turns}
    if isinstance(config, GroupConfig | PPOConfig):
        data["kl_in"] = config.kl_in
    if isinstance(config, PPOConfig):
        data |= {"critic": config.critic, "base": model}
    if isinstance(config, OnlineDPOConfig):
        data["likelihood"] = config.constraints.likelihood
    if isinstance(config, DistillConfig):
        data |= _teaching(config)
    return arguments, data


def _teaching(config: DistillConfig) -> dict[str, Any]:
    """Which sources are teachers, and the folders of those that the trainer holds; the launcher has fetched them."""
    teachers = teachers_of(config.rewards)
    if not config.teaches_exactly:
        return {"teachers": teachers}
    names = [teacher_of(config.rewards[source]).model for source in teachers]
    plans = [resolve_model(name, trust_remote_code=config.trust_remote_code) for name in names]
    return {
        "teachers": teachers,
        "exact": config.distill,
        "folders": [fetch_model(plan) for plan in plans],
    }


def _estimator(config: RunConfig) -> Estimator | None:
    """What replaces TRL's advantages. TRL's own know of no constraints: the same estimators of ours then do."""
    advantage = config.advantage if isinstance(config, AdvantageConfig) else "group"
    if advantage in (TOKEN_ADVANTAGE, TURN_ADVANTAGE):
        return None
    if advantage != "group":
        return ESTIMATORS[advantage]
    scale = config.trl.get("scale_rewards", "group")
    ours = {"none": "dr-grpo", False: "dr-grpo", "batch": "lite-ppo"}.get(scale, "group")
    return ESTIMATORS[ours] if any(reward.constraint for reward in config.rewards) else None


def placeholder_rewards(names: Sequence[str]) -> list[Callable[..., list[float]]]:
    """One function per reward source, whose name TRL uses in metrics. TRL never calls it."""

    def named(name: str) -> Callable[..., list[float]]:
        def answered_by_the_round(**columns: Any) -> list[float]:
            raise AssertionError(f"reward {name!r} is earned in the round, not asked by TRL")

        answered_by_the_round.__name__ = name
        return answered_by_the_round

    return [named(name) for name in names]


def _for_examples(
    config: TuneConfig, folder: RunFolder, world_size: int, model: Path, examples: ExampleSet
) -> tuple[dict[str, Any], dict[str, Any]]:
    batch = derive_tune_batch(
        config,
        num_rows=len(examples.train),
        world_size=world_size,
        on_cpu=not torch.cuda.is_available(),
        context_length=context_length(read_json(model / "config.json")),
    )
    train, held_out = (
        _rows(rows, folder) if rows else None for rows in (examples.train, examples.held_out)
    )
    return trl_arguments(config, batch, folder), {"train_dataset": train, "eval_dataset": held_out}


def _rows(rows: Sequence[Example], folder: RunFolder) -> Dataset:
    """TRL's rows. Pictures are opened as they are drawn, upright and in RGB as everywhere."""
    if "images" not in rows[0]:
        return Dataset.from_list([dict(row) for row in rows])
    paths = [[str(folder.images / image.sha256) for image in row["images"]] for row in rows]
    made = Dataset.from_list(
        [{**row, "images": named} for row, named in zip(rows, paths, strict=True)]
    )
    return made.cast_column("images", List(Image(mode="RGB")))


def not_of_the_eyes(model: Path) -> str | None:
    """What `all-linear` leaves out of a model that sees, as peft's pattern: its tower and projector stay frozen."""
    return rf".*({EYES}).*" if "vision_config" in read_json(model / "config.json") else None


def _lora(settings: LoraSettings, task_type: str, model: Path) -> LoraConfig:
    return LoraConfig(
        exclude_modules=not_of_the_eyes(model) if settings.target_modules == "all-linear" else None,
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type=task_type,
    )


def _quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with doubly quantised scales (QLoRA, arXiv 2305.14314, section 3)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _store_trained_in_float32(model: torch.nn.Module) -> None:
    """bfloat16 loses small steps, and peft keeps a classifier's head in the base's dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and parameter.numel():
            parameter.data = parameter.data.float()
