"""Adapters that neither an engine nor a merged model would have are refused once the trainer has its model."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ycore.errors import ConfigError
from ycore.trl.build import refuse_lost_adapters


def adapted(model: Path, targets: str | list[str], *, is_tied: bool) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=is_tied)
    return get_peft_model(base, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    "targets",
    [
        ["lm_head"],
        ["embed_tokens", "q_proj"],
        ["model.embed_tokens"],
        r".*(embed_tokens|q_proj)",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_no_merged_model_would_have(
    targets: str | list[str], chat_model: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"lora\.target_modules .*(lm_head|embed_tokens).*--full"
    ):
        refuse_lost_adapters(adapted(chat_model, targets, is_tied=True))


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj"], r".*\.(q|v)_proj", ["embed_tokens"]]
)
def test_adapters_that_a_merged_model_has(targets: str | list[str], chat_model: Path) -> None:
    refuse_lost_adapters(adapted(chat_model, targets, is_tied="embed_tokens" not in targets))
