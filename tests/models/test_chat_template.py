"""A plan writes chats as transformers does, by the folder's own template."""

import json
from pathlib import Path

import pytest

from ycore.errors import ModelError
from ycore.models.names import ChatTemplate

SOURCE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for turn in messages %}\n<|{{ turn.role }}|>"
    "{%- if turn.role == 'assistant' %}{% generation %}{{ turn.content }}{{ eos_token }}{% endgeneration %}"
    "{%- else %}{{ turn.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not thinks %}<think></think>{% endif %}{% endif %}"
)
TURNS = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "1"}]
TOOLS = [{"name": "é", "parameters": {}}]


def write(folder: Path, template: object) -> Path:
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("templates", [[None], [["default", SOURCE]], [{"name": "default"}]])
def test_templates_without_a_name_or_a_template_are_a_damaged_model(
    templates: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="save the model again"):
        ChatTemplate(write(tmp_path, templates))


def test_a_template_may_say_by_place_that_json_is_ascii(tmp_path: Path) -> None:
    template = ChatTemplate(write(tmp_path, "{{ 'é' | tojson(true) }}{{ 'é' | tojson }}"))
    assert template.render([], add_generation_prompt=False) == '"\\u00e9""é"'


@pytest.mark.parametrize("template", [SOURCE, [{"name": "default", "template": SOURCE}]])
def test_it_is_what_transformers_writes(
    template: object, chat_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    ours = ChatTemplate(write(tmp_path, template))
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    for tools, thinks, opens in ((None, True, False), (TOOLS, False, True)):
        expected = tokenizer.apply_chat_template(
            TURNS, chat_template=SOURCE, tools=tools, add_generation_prompt=opens, tokenize=False,
            thinks=thinks,
        )  # fmt: skip
        assert expected == ours.render(
            TURNS, add_generation_prompt=opens, tools=tools, thinks=thinks
        )


def test_a_template_that_refuses_is_a_value_error(tmp_path: Path) -> None:
    template = ChatTemplate(write(tmp_path, "{{ raise_exception('no system turns') }}"))
    with pytest.raises(ValueError, match="no system turns"):
        template.render(TURNS, add_generation_prompt=False)
