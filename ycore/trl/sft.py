"""Supervised fine-tuning: the likelihood of given answers. TRL's SFTTrainer.

Not here: which rows are prompt and completion, and so what the loss is of (`data.sft_rows`).
"""

from trl import SFTConfig, SFTTrainer

from ycore.trl.checkpointing import WholeCheckpoints


class Tuner(WholeCheckpoints, SFTTrainer):
    """Checkpoints first, then TRL."""


Config = SFTConfig
TASK = "CAUSAL_LM"
