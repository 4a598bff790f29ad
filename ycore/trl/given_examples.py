"""The trainers on given examples: supervised fine-tuning, DPO, KTO and reward models. All are TRL's."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerBase
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from ycore.data.examples import SOFT_LABEL, Example
from ycore.errors import ConfigError
from ycore.run.metrics import wilson_95
from ycore.trl.base import BaseTrainer

_SPARE_NAME = re.compile("pad|reserved|unused|extra|dummy|placeholder", re.IGNORECASE)


class FineTuner(BaseTrainer, SFTTrainer):
    """Supervised fine-tuning: raise the likelihood of given answers."""

    config_class = SFTConfig


class PairTrainer(BaseTrainer, DPOTrainer):
    """Direct preference optimization (arXiv 2305.18290): make the chosen answer likelier than the rejected one.

    Likelihoods are relative to the model at the start of training: with adapters, the base model without them.
    """

    config_class = DPOConfig


class LabelTrainer(BaseTrainer, KTOTrainer):
    """KTO (arXiv 2402.01306): learn from answers that are labelled good or bad one by one, without pairs.

    Its KL term pairs every prompt with the previous row's answer in the micro-batch. Rows are therefore read in the
    order of the dataset, which is shuffled once by the seed, and a micro-batch has at least two rows.
    """

    config_class = KTOConfig


class RewardModelTrainer(BaseTrainer, RewardTrainer):
    """A reward model (Bradley and Terry 1952, as in arXiv 2203.02155): one number per conversation, higher is better.

    It is a classifier with one label, saved whole with its adapters merged: transformers and vLLM's pooling server
    load it by its folder.
    """

    config_class = RewardConfig
    task_type = "SEQ_CLS"

    def __init__(self, *, train_dataset: Dataset, args: RewardConfig, **kwargs: Any) -> None:
        is_soft = SOFT_LABEL in train_dataset.column_names
        if is_soft:
            args.remove_unused_columns = False
        super().__init__(train_dataset=train_dataset, args=args, **kwargs)
        if is_soft:
            self.data_collator: Any = functools.partial(
                _collate_soft_labels, self.data_collator
            )
        tokenizer = self.processing_class
        if tokenizer.pad_token_id in last_tokens(tokenizer):
            raise ConfigError(
                f"a reward model is read at the last token that is no padding, and {tokenizer.pad_token!r} both pads and "
                "ends a conversation; name another token of the tokenizer, which ends none, e.g. --pad-token '<unk>', or "
                "take a model whose tokenizer has a spare one"
            )

    @classmethod
    def prepare_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> None:
        """Pad with a token that ends no conversation, if the tokenizer has one: the unknown one, one that is named so,
        or one that no template writes.

        transformers reads the reward at the last token that is not padding, vLLM at the last token. If padding were
        the end token, they would read at different places.
        """
        ends = last_tokens(tokenizer)
        if tokenizer.pad_token_id not in ends:
            return
        template = str(tokenizer.chat_template)
        added = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        unused = [token for token in special if token not in template]
        named = [token for token in unused if _SPARE_NAME.search(token)]
        unfit = {None, tokenizer.bos_token, *tokenizer.convert_ids_to_tokens(list(ends))}
        candidates = (tokenizer.unk_token, *named, *unused)
        spare = next((token for token in candidates if token not in unfit), None)
        if spare is not None:
            tokenizer.pad_token = spare

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """TRL's loss; with soft labels p the cross-entropy, p * -log s(m) + (1 - p) * -log s(-m) of the margin m.

        That is TRL's loss, of p = 1, and (1 - p) * m.
        """
        soft_labels_B = inputs.pop(SOFT_LABEL, None)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if soft_labels_B is not None:
            chosen_B, rejected_B = outputs.logits.squeeze(-1).chunk(2)
            loss = loss + ((1 - soft_labels_B) * (chosen_B - rejected_B)).mean()
        return (loss, outputs) if return_outputs else loss

    def measure(self) -> dict[str, Any]:
        """Accuracy on the held-out pairs with its 95 % interval, mean `loss` and `margin`; `right` of `n` pairs.

        TRL's own figures are means over batches, and the last batch may be smaller.
        """
        margins, soft_labels = self._held_out_margins()
        right = int((margins > 0).sum())
        total = margins.numel()
        return {
            "n": total,
            "right": right,
            "loss": (softplus(-margins) + (1 - soft_labels) * margins).mean().item(),
            "margin": margins.mean().item(),
            "accuracy": right / total,
            "accuracy_95": [round(end, 4) for end in wilson_95(right, total)],
        }

    @torch.no_grad()
    def _held_out_margins(self) -> tuple[Tensor, Tensor]:
        """Chosen minus rejected reward of every held-out pair of all ranks, and its soft label, 1 without one.

        Both are (N,) float32 on the CPU.
        """
        self.model.eval()
        columns = []
        for batch in self.get_eval_dataloader():
            batch = self._prepare_inputs(batch)
            batch.pop("margin", None)
            soft_labels = batch.pop(SOFT_LABEL, None)
            with self.compute_loss_context_manager():
                scores = self.model(**batch).logits.squeeze(-1).float()
            chosen, rejected = scores.chunk(2)
            margins = chosen - rejected
            if soft_labels is None:
                soft_labels = torch.ones_like(margins)
            pair = torch.stack([margins, soft_labels], dim=1)
            columns.append(self.accelerator.gather_for_metrics(pair).cpu())
            self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )  # it may stop here
        self.model.train()
        margins, soft_labels = torch.cat(columns).unbind(dim=1)
        return margins, soft_labels

    def write_model(self, folder: Path, *, dtype: torch.dtype, merge: bool) -> None:
        """Save the classifier whole, whatever `merge` says: adapters are merged in float32 and rounded once.

        The adapters are also saved apart, in `adapter/`: a critic of `ycore ppo` may begin with them.
        """
        if not self.accelerator.is_main_process:
            return
        model = self.bare_model
        if isinstance(model, PeftModel):
            model.save_pretrained(folder / "adapter")
            model = model.float().merge_and_unload()
        model.to(dtype).save_pretrained(folder)
        self.processing_class.save_pretrained(folder)


def _collate_soft_labels(
    collate: Callable[[list[Example]], dict[str, Any]], rows: list[Example]
) -> dict[str, Any]:
    """Add the soft labels to TRL's batch; 1 for held-out rows of a dataset without them."""
    soft_labels = [row.get(SOFT_LABEL, 1.0) for row in rows]
    return {**collate(rows), SOFT_LABEL: torch.tensor(soft_labels)}


def last_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of the tokens that can be the last of a text or a conversation, as TRL tokenizes them for a reward model."""
    texts = [tokenizer(str(tokenizer.eos_token or ""))["input_ids"]]
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        texts.append(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))
    return {token_ids[-1] for token_ids in texts if token_ids}
