"""A reward model (Bradley and Terry 1952, as in arXiv 2203.02155): one number a conversation, higher for the better.

TRL's RewardTrainer on a classifier with one label. It is saved whole, adapters merged, so that transformers and vLLM's
pooling server load it by its folder.

Not here: where pairs come from (`data.pairs`), and what the accuracy is worth (`telemetry.interval`).
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from ycore.trl.checkpointing import WholeCheckpoints


class Tuner(WholeCheckpoints, RewardTrainer):
    """Checkpoints first, then TRL."""


Config = RewardConfig
TASK = "SEQ_CLS"


def give_padding_its_own_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """transformers reads the reward at the last token that is no padding, vLLM at the last token.

    Where padding is the end token, and a conversation ends with that, the two would read at different places.
    """
    if tokenizer.pad_token_id == tokenizer.eos_token_id and tokenizer.unk_token not in (None, tokenizer.eos_token):
        tokenizer.pad_token = tokenizer.unk_token


@torch.no_grad()
def measure_pairs(trainer: Tuner) -> dict[str, float]:
    """Of the held-out pairs: `n`, how many are `right`, in their author's order, mean `loss` and `margin`.

    TRL's own figures are means over batches, the last of which may be smaller. All ranks measure together.
    """
    trainer.model.eval()
    margins = []
    for batch in trainer.get_eval_dataloader():
        batch = trainer._prepare_inputs(batch)
        batch.pop("margin", None)
        with trainer.compute_loss_context_manager():
            scores = trainer.model(**batch).logits.squeeze(-1).float()
        chosen, rejected = scores.chunk(2)
        margins.append(trainer.accelerator.gather_for_metrics(chosen - rejected).cpu())
    trainer.model.train()
    every: Any = torch.cat(margins)
    losses = -torch.nn.functional.logsigmoid(every)
    return {
        "n": every.numel(),
        "right": int((every > 0).sum()),
        "loss": losses.mean().item(),
        "margin": every.mean().item(),
    }


def save_whole(trainer: Tuner, folder: Path, *, dtype: torch.dtype) -> None:
    """The classifier as one model; adapters are merged in float32 and then rounded once."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        model = model.float().merge_and_unload()
    model.to(dtype).save_pretrained(folder)
