"""Build a run's trainer: the algorithm's class with its arguments, model, adapters and data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import (
    _MODEL_TO_CONVERSION_PATTERN,
    _MOE_TARGET_MODULE_MAPPING,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from ycore.config.algorithms import find_algorithm, load_reference
from ycore.config.schema import AnyConfig, LoraSettings, RunConfig, TuneConfig
from ycore.config.trl_arguments import derive_batch, derive_tune_batch, trl_arguments
from ycore.data.examples import Example, ExampleSet
from ycore.errors import ConfigError
from ycore.models.names import context_length, read_settings
from ycore.rewards.loading import reward_names
from ycore.run.files import RunFolder
from ycore.trl.base import BaseTrainer, bare
from ycore.trl.forward import add_compact_head, fuse_adapters, needs_compact_head

VISION_MODULES = "vision|visual|projector|connector|merger|aligner"
"""Substrings of the names of vision modules, in all families that TRL trains."""


def load_trainer_class(config: AnyConfig) -> type[BaseTrainer]:
    """Import the class of the run's algorithm, which the table of algorithms names."""
    named: Any = load_reference(find_algorithm(config.algorithm).trainer)
    trainer: type[BaseTrainer] = named if isinstance(named, type) else named(config)
    return trainer


def compute_dtype(config: AnyConfig) -> torch.dtype:
    """The dtype in which the trainer and the policy's engines compute."""
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def attention_of(model: Path) -> dict[str, str]:
    """Choose attention that caps its logits where the model's config does; transformers' sdpa leaves it out."""
    capped = read_settings(model / "config.json").get("attn_logit_softcapping")
    return {"attn_implementation": "eager"} if capped else {}


def build_trainer(
    config: AnyConfig,
    folder: RunFolder,
    *,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: Sequence[TrainerCallback],
    world_size: int,
    examples: ExampleSet | None = None,
) -> Any:
    """Build the trainer of a run; one with rollouts still needs its `rounds`.

    Args:
        model: the folder of the weights that training begins with.
        world_size: ranks of the run, over all machines.
        examples: the rows of a run without rollouts.
    """
    trainer_class: Any = load_trainer_class(config)
    if isinstance(config, RunConfig):
        arguments, data = _for_rollouts(config, folder, world_size)
        data |= trainer_class.settings_of(config, model)
    else:
        assert examples is not None
        arguments, data = _for_examples(config, folder, world_size, model, examples)
    # Frozen weights are stored in the dtype they are computed with; weights in training are stored in float32.
    stored = torch.float32 if config.lora is None else compute_dtype(config)
    arguments["model_init_kwargs"] = {
        "dtype": stored,
        **attention_of(model),
        **(arguments.get("model_init_kwargs") or {}),
    }
    if config.quantize is not None:
        # NF4 with doubly quantised scales (QLoRA, arXiv 2305.14314, section 3).
        data["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype(config),
        )
    settings = trainer_class.config_class(**arguments)
    if isinstance(config, RunConfig):
        # TRL's class takes no groups of one, and its trainer does.
        settings.num_generations = config.group_size
    adapters = None
    if config.lora is not None:
        adapters = _lora(config.lora, trainer_class.task_type, model)
    trainer = trainer_class(
        model=str(model),
        args=settings,
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=list(callbacks),
        **data,
    )
    if examples is not None or config.quantize is not None:
        # TRL makes adapters of a quantised base bfloat16.
        _store_trained_in_float32(trainer.model)
    is_language_model = trainer_class.task_type == "CAUSAL_LM"
    if is_language_model:
        refuse_lost_adapters(trainer.bare_model)
    if examples is not None and is_language_model and needs_compact_head(trainer):
        _add_compact_heads(trainer)
    on_cpu = trainer.accelerator.device.type == "cpu"
    if on_cpu and not is_deepspeed_zero3_enabled() and not trainer.keeps_peft:
        fuse_adapters(trainer.model)
    return trainer


def _add_compact_heads(trainer: Any) -> None:
    """For the policy and the reference. WPO's weights (`use_weighting`) need what only TRL's head computes."""
    if getattr(trainer, "use_weighting", False):
        return
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            inner = bare(trainer.accelerator.unwrap_model(model))
            add_compact_head(inner, temperature=1.0, with_logits=True)


def _for_rollouts(
    config: RunConfig, folder: RunFolder, world_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of TRL's config, and of its trainer."""
    batch = derive_batch(config, world_size=world_size, on_cpu=not torch.cuda.is_available())
    arguments = trl_arguments(config, batch, folder)
    arguments["reward_weights"] = config.reward_weights
    rows_per_round = batch.per_device_train_batch_size * batch.steps_per_generation * world_size
    if config.group_size == 1:
        arguments["num_generations"] = max(2, rows_per_round)
    # The round draws the prompts; the rows of TRL's loader only say that a round is due.
    rows = Dataset.from_dict({"prompt": ["tick"] * rows_per_round})
    rewards = placeholder_rewards(reward_names(config.rewards))
    return arguments, {"reward_funcs": rewards, "train_dataset": rows}


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
        context_length=context_length(read_settings(model / "config.json")),
    )
    held_out = _rows(examples.held_out, folder) if examples.held_out else None
    data = {"train_dataset": _rows(examples.train, folder), "eval_dataset": held_out}
    return trl_arguments(config, batch, folder), data


def _rows(rows: Sequence[Example], folder: RunFolder) -> Dataset:
    """TRL's rows. Images are opened as they are drawn, upright and in RGB as everywhere.

    Turns with different keys, and tools' arguments, stay as they are: Arrow alone would give each the keys of all.
    """
    if "images" not in rows[0]:
        return Dataset.from_list([dict(row) for row in rows], on_mixed_types="use_json")
    with_paths = [
        {**row, "images": [str(folder.images / image.sha256) for image in row["images"]]}
        for row in rows
    ]
    shown = Dataset.from_list(with_paths, on_mixed_types="use_json")
    return shown.cast_column("images", List(Image(mode="RGB")))


def vision_modules(model: Path) -> str | None:
    """The pattern, as peft takes it, of the vision modules that `all-linear` leaves frozen; None without vision."""
    has_vision = "vision_config" in read_settings(model / "config.json")
    return rf".*({VISION_MODULES}).*" if has_vision else None


def _lora(settings: LoraSettings, task_type: str, model: Path) -> LoraConfig:
    is_all = settings.target_modules == "all-linear"
    return LoraConfig(
        exclude_modules=vision_modules(model) if is_all else None,
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_all_linear(model) if is_all else settings.target_modules,
        task_type=task_type,
    )


def _all_linear(model: Path) -> str | list[str]:
    """Return what gets adapters by default. It leaves out what peft would add of a mixture of experts: the experts and
    their router. Those get adapters where they are named.
    """
    kind = read_settings(model / "config.json").get("model_type")
    mixture = _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(kind))
    if mixture is None:
        return "all-linear"
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = skeleton.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, layer in skeleton.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    return sorted(linear - mixture.keys())


def refuse_lost_adapters(model: nn.Module) -> None:
    """ConfigError where a layer has adapters that no engine and no merged model would have.

    The loss is computed from the output layer's own weight, without adapters. Where that is also the embedding's, an
    adapter of the embedding would move both in the merged model, and in the trainer the embedding alone.
    """
    inner = bare(model)
    fixed = [inner.get_output_embeddings()]
    text = inner.config.get_text_config()  # Qwen2.5-VL's does not say
    if getattr(text, "tie_word_embeddings", inner.config.tie_word_embeddings):
        fixed.append(inner.get_input_embeddings())
    for name, layer in inner.named_modules():
        if layer in fixed and isinstance(layer, LoraLayer):
            raise ConfigError(
                f"lora.target_modules takes {name}, and the loss reads the output layer's weight without adapters, which "
                "may be the embedding's too (tie_word_embeddings); leave it out of lora.target_modules, or train every "
                "weight with --full"
            )


def _store_trained_in_float32(model: nn.Module) -> None:
    """bfloat16 loses small steps, and peft keeps a classifier's head in the base's dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and parameter.numel():
            parameter.data = parameter.data.float()
