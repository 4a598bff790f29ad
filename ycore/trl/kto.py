"""KTO (arXiv 2402.01306): answers that are good or bad each for itself, without pairs. TRL's KTOTrainer.

Its KL term pairs every prompt with the answer before it in the micro-batch, so rows are read in the order of the
dataset, and a micro-batch has two rows or more.

Not here: that order, which is shuffled once by the seed (`data.examples`).
"""

from trl import KTOConfig, KTOTrainer

from ycore.trl.checkpointing import WholeCheckpoints


class Tuner(WholeCheckpoints, KTOTrainer):
    """Checkpoints first, then TRL."""


Config = KTOConfig
TASK = "CAUSAL_LM"
