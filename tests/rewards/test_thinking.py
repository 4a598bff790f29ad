"""Thinking that the chat template opens: the completion begins inside it, for every reward, eval and judge."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.harness import ycore
from ycore.rewards.answers import without_thinking
from ycore.rewards.builtin import BUILTIN
from ycore.rewards.code import StdioTests, program_of
from ycore.rewards.loading import IN_THINKING, inputs_of
from ycore.rewards.worker import LoadedReward, call_reward
from ycore.round.assemble import Assembly
from ycore.scoring.scoring import text_without_thinking
from ycore.types import Completion, Turn, opens_thinking

CUT_OFF = "Two and three, that could be 5"
WHOLE = "Two and three make five.\n</think>\n\n5"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<\uff5cAssistant\uff5c><think>\n", True),
        ("User: 2 + 3?\nAssistant: <think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("[SYSTEM_PROMPT]Think.[/SYSTEM_PROMPT]2 + 3?[/INST][THINK]", True),
        ("<seed:bos>assistant\n<seed:think>", True),
        ("<|im_start|>assistant\n<reasoning>\n", True),
        ("<|im_start|>assistant\n[THINK]\n[/THINK]\n", False),
        ("Think in <think> tags.<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_thinking_is_open(prompt: str, opened: bool) -> None:
    assert opens_thinking(prompt) is opened


MAGISTRAL = ["[THINK]", "[/THINK]"]
COMMAND = ["<|START_THINKING|>", "<|END_THINKING|>"]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


@pytest.mark.parametrize(
    ("special", "written", "answer"),
    [
        (MAGISTRAL, "[THINK] maybe 5 [/THINK] 4 </s>", "4"),
        (MAGISTRAL, "[THINK] maybe 5", ""),
        (MAGISTRAL, "maybe 5 </s>", "maybe 5"),
        (COMMAND, "<|START_THINKING|> maybe 5 <|END_THINKING|> 4 </s>", "4"),
        (
            HARMONY,
            "<|channel|> analysis <|message|> maybe 5 <|end|> <|start|> assistant <|channel|> final <|message|> 4 </s>",
            "4",
        ),
        (HARMONY, "<|channel|> analysis <|message|> maybe 5", ""),
    ],
)
def test_tags_that_are_special_tokens_are_seen(
    special: list[str], written: str, answer: str
) -> None:
    words = ["maybe", "4", "5", "analysis", "final", "assistant", "</s>", "?"]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="?")
    base = Tokenizer(model)
    base.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token="</s>", additional_special_tokens=special
    )
    token_ids = tuple(tokenizer(written, add_special_tokens=False)["input_ids"])
    nothing: Any = None
    parts = Assembly(
        folder=nothing,
        config=nothing,
        started=nothing,
        tokenizer=tokenizer,
        prompts=nothing,
        dialogues=nothing,
    )
    engine_text = tokenizer.decode(token_ids, skip_special_tokens=True)
    completion = parts.with_thinking(
        Completion(token_ids, None, engine_text, "stop", policy_version=0), (2,)
    )
    assert without_thinking(completion.full_text) == answer
    assert "</s>" not in completion.text and "<|end|>" not in completion.text


def builtin(name: str, completion: Any, *, in_thinking: bool) -> Any:
    function = BUILTIN[name]
    source = LoadedReward(function, inputs_of(function), reads_answers=name != "length")
    inputs = {"prompts": ["?"], "completions": [completion], "answer": ["5"]}
    request = {"inputs": inputs | {IN_THINKING: [in_thinking]}, "step": 0, "count": 1}
    (value,) = call_reward(source, request)["values"]
    return value


@pytest.mark.parametrize("as_chat", [False, True])
def test_an_answer_inside_the_thinking_earns_nothing(as_chat: bool) -> None:
    def rewards(text: str, *, in_thinking: bool) -> list[float]:
        completion = [{"role": "assistant", "content": text}] if as_chat else text
        names = ("exact_answer", "contains_answer", "numeric_answer", "math", "format")
        return [builtin(name, completion, in_thinking=in_thinking) for name in names]

    assert rewards(CUT_OFF, in_thinking=True) == [0.0] * 5
    assert rewards(WHOLE, in_thinking=True) == [1.0] * 5
    assert rewards(WHOLE, in_thinking=False) == [1.0] * 4 + [0.0]
    assert rewards(f"<think>{WHOLE}", in_thinking=False) == [1.0] * 5


@pytest.mark.parametrize("tag", ["thinking", "seed:think", "reasoning", "thought"])
def test_thinking_in_other_tags(tag: str) -> None:
    assert builtin("exact_answer", f"<{tag}>{CUT_OFF}", in_thinking=False) == 0
    assert builtin("exact_answer", CUT_OFF, in_thinking=True) == 0
    assert builtin("exact_answer", f"5, or 6\n</{tag}>\n5", in_thinking=True) == 1
    assert program_of(f"<{tag}>```python\ny = 1\n```", StdioTests((("1", "1"),))).strip() == ""


def test_a_functions_completions_are_stripped_and_otherwise_as_the_policy_wrote_them() -> None:
    texts: list[str] = []

    def see(completions: list[str], **_columns: Any) -> list[float]:
        texts.extend(completions)
        return [0.0] * len(completions)

    inputs = {"completions": [CUT_OFF, WHOLE], IN_THINKING: [True, True]}
    for strips in (True, False):
        source = LoadedReward(see, inputs_of(see), strips_thinking=strips)
        call_reward(source, {"inputs": inputs, "step": 0, "count": 2})
    assert texts == ["", "5", CUT_OFF, WHOLE]


def test_judges_and_programs_get_what_follows_the_thinking() -> None:
    def written(text: str, turns: tuple[Turn, ...] = ()) -> Completion:
        return Completion((1,), None, text, "stop", 0, turns, in_thinking=True)

    assert (
        text_without_thinking(written(CUT_OFF)) == ""
        and text_without_thinking(written(WHOLE)) == "5"
    )
    turn = Turn(True, 1, ({"role": "assistant", "content": CUT_OFF},))
    assert "5" not in text_without_thinking(written(CUT_OFF, (turn,)))
    tests = StdioTests((("1", "1"),))
    assert program_of(written("```python\nprint(1)\n```").full_text, tests) == ""


@pytest.mark.verify
def test_eval_knows_it_from_the_rendered_prompt(chat_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    row = {"prompt": "Write a letter.", "answer": "a"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "seen.py").write_text(
        "def stripped(completions, in_thinking=(), **columns):\n"
        "    return [float(is_in and c[-1]['content'] == '') for c, is_in in zip(completions, in_thinking)]\n"
    )
    recipe = {
        "model": str(model),
        "dataset": "rows.jsonl",
        "rewards": [
            {"reward": "seen.py:stripped", "strip_thinking": True},
            {"reward": "format"},
        ],
    }
    (tmp_path / "think.yaml").write_text(json.dumps(recipe))
    done = ycore(
        "eval --recipe think.yaml --num-samples 2 --max-tokens 4 --engine transformers --json",
        cwd=tmp_path,
    )
    (line,) = done.stdout.splitlines()
    assert '"rewards/stripped": 1.0' in line or '"rewards/stripped/mean": 1.0' in line, line
