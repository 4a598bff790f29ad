"""Diversity, and what rows may ask for."""

from pathlib import Path

import numpy as np
import pytest

from ycore.errors import DataError
from ycore.flow.flow_inputs import load_conditions
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.picture_rounds import conditions, diversity


def test_diversity_is_the_mean_distance_within_a_class() -> None:
    values = np.array([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    assert diversity(values, np.array([0, 0, 1])) == pytest.approx(5.0)
    assert diversity(values, np.array([0, 1, 2])) == 0.0


def config_of(dataset: str, **keys: object) -> FlowConfig:
    return FlowConfig.model_validate(
        {
            "model": "m",
            "dataset": dataset,
            "output": "o",
            "rewards": [{"reward": "r.py:f"}],
            **keys,
        },
        strict=False,
    )


def test_rows_ask_for_classes_and_pass_their_other_columns_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": "a three", "label": 2, "style": "bold"}\n{"label": "0", "style": "thin"}\n'
    )
    prompt_set = load_conditions(config_of(str(file)), num_classes=3)
    assert [(prompt.content, dict(prompt.columns)) for prompt in prompt_set.prompts] == [
        ("a three", {"label": 2, "style": "bold"}),
        ("0", {"label": 0, "style": "thin"}),
    ]
    every = load_conditions(config_of("classes", condition_column="digit"), num_classes=3)
    assert [
        prompt.columns["digit"]
        for prompt in conditions([*every.prompts, *every.prompts], "digit")
    ] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"label": 1}\n{"prompt": "x"}\n', "the condition 'label' is missing in row 1"),
        ('{"label": 3}\n', "'label' is 3 in row 0 .*a whole number from 0 to 2"),
        ('{"label": "seven"}\n', "'label' is 'seven' in row 0"),
        (
            '{"labels": 1}\n',
            "has no column 'label', the class to draw; it has labels; did you mean 'labels'",
        ),
    ],
)
def test_a_row_without_its_condition_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        load_conditions(config_of(str(file)), num_classes=3)
