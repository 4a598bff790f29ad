"""A trainer without rollouts, built from a run's config: TRL's class of the method, its settings, its rows.

Not here: the methods (`sft`, `reward`, `dpo`, `kto`), the process (`roles.tuner`), and the rows (`data.examples`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ycore.config.batch import derive_tune_batch
from ycore.config.schema import TuneConfig
from ycore.config.trl_arguments import trl_arguments
from ycore.data.examples import Example, ExampleSet
from ycore.models.folder import context_length, read_json
from ycore.run.paths import RunFolder
from ycore.trl import dpo, kto, reward, sft

METHODS: Mapping[str, ModuleType] = {"sft": sft, "reward": reward, "dpo": dpo, "kto": kto}


def compute_dtype(config: TuneConfig) -> torch.dtype:
    """What the trainer computes in."""
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def build_tuner(
    config: TuneConfig,
    folder: RunFolder,
    *,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    examples: ExampleSet,
    callbacks: Sequence[TrainerCallback],
    world_size: int = 1,
) -> Any:
    """One of the `Tuner` classes of the methods, ready to train."""
    method = METHODS[config.algorithm]
    batch = derive_tune_batch(
        config,
        num_rows=len(examples.train),
        world_size=world_size,
        on_cpu=not torch.cuda.is_available(),
        context_length=context_length(read_json(model / "config.json")),
    )
    arguments = trl_arguments(config, batch, folder)
    # A frozen base is kept as it is computed with; weights in training are kept in float32.
    stored = torch.float32 if config.lora is None else compute_dtype(config)
    arguments["model_init_kwargs"] = {"dtype": stored, **(arguments.get("model_init_kwargs") or {})}
    trainer = method.Tuner(
        model=str(model),
        args=method.Config(**arguments),
        train_dataset=_dataset(examples.train),
        eval_dataset=_dataset(examples.held_out) if examples.held_out else None,
        processing_class=tokenizer,
        peft_config=None if config.lora is None else _lora(config, method.TASK),
        callbacks=list(callbacks),
    )
    _train_in_float32(trainer.model)
    return trainer


def _dataset(rows: Sequence[Example]) -> Dataset:
    dataset: Dataset = Dataset.from_list([dict(row) for row in rows])
    return dataset


def _lora(config: TuneConfig, task: str) -> LoraConfig:
    assert config.lora is not None
    return LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type=task,
    )


def _train_in_float32(model: torch.nn.Module) -> None:
    """peft keeps a classifier's head in the base's dtype, where small steps of bfloat16 are lost."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and parameter.numel():
            parameter.data = parameter.data.float()
