"""Packed rows: every completion once, with its own prompt, and which models can be packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from ycore.trl.packing import IGNORE, attention_inputs, pack, path_of, plan_blocks, use_segments

tokens = st.integers(1, 9)
batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
        st.lists(tokens, max_size=6).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


@given(batches, st.booleans())
def test_every_completion_is_in_the_row_once_after_its_own_prompt(
    batch: list[tuple[tuple[int, ...], tuple[int, ...]]], share: bool
) -> None:
    prompts, completions = (
        [prompt for prompt, _ in batch],
        [completion for _, completion in batch],
    )
    blocks = plan_blocks(prompts, completions, share=share)
    members = [index for block in blocks for index in block.members]
    assert sorted(members) == [
        index for index, completion in enumerate(completions) if completion
    ]
    width = max(1, *map(len, completions))
    row, places = pack(
        blocks, prompts, completions, [index * width for index in range(len(completions))]
    )
    wanted = row["shift_labels"] != IGNORE
    labels = torch.zeros(len(batch) * width, dtype=torch.long).scatter(
        0, places[wanted], row["shift_labels"][wanted]
    )
    for tokens_of_one, completion in zip(
        labels.view(len(batch), width).tolist(), completions, strict=True
    ):
        assert tuple(tokens_of_one[: len(completion)]) == completion
    length = sum(block.shared + sum(block.lengths) for block in blocks)
    assert row["input_ids"].shape == places.shape == (1, max(1, length))
    for block in blocks:
        assert len({prompts[index] for index in block.members}) == 1
    if share:
        assert len(blocks) == len({prompts[index] for index in members})


def test_a_shared_prompt_is_in_the_row_once() -> None:
    prompts, completions = [(1, 2, 3), (7,), (1, 2, 3)], [(4, 5), (8,), (6,)]
    blocks = plan_blocks(prompts, completions, share=True)
    row, places = pack(
        blocks, prompts, completions, [2 * index for index in range(len(completions))]
    )
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 3, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0]]
    assert row["shift_labels"].tolist() == [[IGNORE, IGNORE, 4, 5, 6, 8]]
    assert places.tolist() == [[0, 0, 0, 1, 4, 2]]


def test_flash_attention_gets_the_bounds_of_every_sequence() -> None:
    prompts, completions = [(1, 2, 3), (1, 2, 3)], [(4, 5), (6,)]
    blocks = plan_blocks(prompts, completions, share=False)
    inputs = attention_inputs("varlen", blocks, torch.device("cpu"))
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 4, 7]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4


def made(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        )
    model.config._attn_implementation = attention
    return model


SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 9,
}


@pytest.mark.parametrize(
    ("attention", "path"),
    [("sdpa", "segments"), ("flash_attention_2", "varlen"), ("eager", None)],
)
def test_the_attention_decides_how_rows_are_packed(attention: str, path: str | None) -> None:
    assert path_of(made(LlamaConfig(num_hidden_layers=1, **SMALL), attention)) == path


def test_a_window_in_any_layer_cannot_be_packed() -> None:
    windowed = Qwen2Config(
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        **SMALL,
    )
    assert path_of(made(windowed, "sdpa")) is None
    assert (
        path_of(
            made(Qwen2Config(num_hidden_layers=2, use_sliding_window=False, **SMALL), "sdpa")
        )
        == "segments"
    )


def test_the_name_of_the_attention_is_not_saved_with_the_model() -> None:
    model = made(LlamaConfig(num_hidden_layers=1, **SMALL), "sdpa")
    use_segments(model)
    assert path_of(model) == "segments"
    assert "segments" not in model.config.to_json_string()
