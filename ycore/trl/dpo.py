"""Direct preference optimization (arXiv 2305.18290): make the chosen answer likelier than the rejected one.

Likelihoods are relative to the model at the start of training: with adapters, the base model without them.
"""

from trl import DPOConfig, DPOTrainer

from ycore.trl.base import BaseTrainer


class Trainer(BaseTrainer, DPOTrainer):
    config_class = DPOConfig
