"""GMPO (arXiv 2507.20673): the geometric mean of the tokens' ratios, by TRL's own trainer, behind ycore's seam.

Not here: anything but the order of the classes. TRL's GMPO replaces `_compute_loss` alone, and does not correct for an
engine whose probabilities differ from the trainer's.
"""

from trl.experimental.gmpo import GMPOTrainer

from ycore.algorithms.trl_seam import SeamGRPOTrainer


class SeamGMPOTrainer(SeamGRPOTrainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then GRPO's everything else."""
