"""Supervised fine-tuning: raise the likelihood of given answers. TRL's SFTTrainer."""

from trl import SFTConfig, SFTTrainer

from ycore.trl.base import BaseTrainer


class Trainer(BaseTrainer, SFTTrainer):
    config_class = SFTConfig
