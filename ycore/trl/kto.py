"""KTO (arXiv 2402.01306): learn from answers that are labelled good or bad one by one, without pairs.

Its KL term pairs every prompt with the previous row's answer in the micro-batch. Rows are therefore read in the order
of the dataset, which is shuffled once by the seed, and a micro-batch has at least two rows.
"""

from trl import KTOConfig, KTOTrainer

from ycore.trl.base import BaseTrainer


class Trainer(BaseTrainer, KTOTrainer):
    config_class = KTOConfig
