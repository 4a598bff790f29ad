"""Reward models: the same tokens in training and when they score, and a padding that ends no conversation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.tiny_model import write_tiny_model
from ycore.errors import ConfigError
from ycore.scoring.model_scorers import reward_model_encoder
from ycore.trl.given_examples import RewardModelTrainer, last_tokens
from ycore.types import Prompt

QUESTION = "What is 2 + 3?"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def text_tokenizer(model: Path, added: str) -> PreTrainedTokenizerBase:
    """A tokenizer without a chat template that adds tokens to a text: `<unk> $A`, `$A <|end|>`, or none."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.bos_token = "<|system|>"
    names = [name for name in added.split() if name != "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=added,
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
    )
    return tokenizer


def trainer_of(
    model: Path, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]], **args: Any
) -> RewardModelTrainer:
    settings = RewardModelTrainer.config_class(
        output_dir=str(model.parent / "out"), report_to="none", use_cpu=True, bf16=False, **args
    )
    RewardModelTrainer.prepare_tokenizer(tokenizer)
    return RewardModelTrainer(
        model=str(model),
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(list(rows)),
    )


@pytest.mark.parametrize(
    "added", ["<|system|> $A", "$A <|end|>", "<|system|> $A <|end|>", "$A"]
)
def test_a_text_reward_model_is_asked_with_the_tokens_it_was_trained_on(
    added: str, model: Path
) -> None:
    tokenizer = text_tokenizer(model, added)
    rows = [{"prompt": QUESTION, "chosen": " 5", "rejected": " 6"}]
    (row,) = trainer_of(model, tokenizer, rows).train_dataset
    encode = reward_model_encoder(tokenizer)
    prompt = Prompt(0, QUESTION)
    assert row["chosen_ids"] == encode(prompt, " 5")
    assert row["rejected_ids"] == encode(prompt, " 6")


def test_a_chat_reward_model_is_asked_with_the_tokens_it_was_trained_on(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = [{"role": "user", "content": QUESTION}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("5", "6"))
    rows = [{"prompt": question, "chosen": chosen, "rejected": rejected}]
    (row,) = trainer_of(model, tokenizer, rows).train_dataset
    assert row["chosen_ids"] == reward_model_encoder(tokenizer)(Prompt(0, question), "5")


def test_a_chat_reward_model_is_asked_of_a_text_as_of_a_users_turn(model: Path) -> None:
    """`ycore reward` makes texts turns, where the tokenizer has a chat template."""
    encode = reward_model_encoder(AutoTokenizer.from_pretrained(model))
    question = [{"role": "user", "content": QUESTION}]
    assert encode(Prompt(0, QUESTION), "5") == encode(Prompt(0, question), "5")


def test_a_text_reward_model_reads_one_turn(model: Path) -> None:
    encode = reward_model_encoder(text_tokenizer(model, "<|system|> $A"))
    turn = {"role": "user", "content": QUESTION}
    assert encode(Prompt(0, [turn]), " 5") == encode(Prompt(0, QUESTION), " 5")
    with pytest.raises(
        ConfigError, match=r"row 7 is a conversation of 2 turns.*no chat template"
    ):
        encode(Prompt(7, [turn, turn]), " 5")


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<|user|>", "<|reserved_special_token_3|>"], "<|reserved_special_token_3|>"),
        (["<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),
        (["<|fim_middle|>"], "<|fim_middle|>"),
    ],
)
def test_another_spare_token_pads_where_the_end_token_would(
    special: list[str], expected: str, model: Path
) -> None:
    tokenizer = without_spare_tokens(model)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    RewardModelTrainer.prepare_tokenizer(tokenizer)
    assert tokenizer.pad_token == expected
    assert tokenizer.pad_token_id not in last_tokens(tokenizer)


def test_a_reward_model_without_a_spare_token_is_refused(model: Path) -> None:
    rows = [{"chosen": "2 + 3 = 5", "rejected": "2 + 3 = 6"}]
    with pytest.raises(ConfigError, match=r"'<\|end\|>' both pads and ends .*--pad-token"):
        trainer_of(model, without_spare_tokens(model), rows)


def test_a_padding_that_ends_a_conversation_is_refused(model: Path) -> None:
    """The template's last token is `<|end|>`, also where the end token is another."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<|user|>"
    rows = [{"chosen": "2 + 3 = 5", "rejected": "2 + 3 = 6"}]
    with pytest.raises(ConfigError, match=r"'<\|end\|>' both pads and ends"):
        trainer_of(model, tokenizer, rows, pad_token="<|end|>")


def without_spare_tokens(model: Path) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer, padding with its end token and without any other special token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    kept = {token: number for token, number in vocabulary.items() if len(token) == 1}
    kept["<|end|>"] = vocabulary["<|end|>"]
    backend = Tokenizer(models.WordLevel(kept, unk_token="<|end|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
