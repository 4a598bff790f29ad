"""Direct preference optimization (arXiv 2305.18290): the chosen answer likelier than the rejected one, relative to the
model that training began with. TRL's DPOTrainer; with adapters, that model is the base without them.

Not here: where pairs come from (`data.pairs`).
"""

from trl import DPOConfig, DPOTrainer

from ycore.trl.checkpointing import WholeCheckpoints


class Tuner(WholeCheckpoints, DPOTrainer):
    """Checkpoints first, then TRL."""


Config = DPOConfig
TASK = "CAUSAL_LM"
