"""Chat templates with a small tokenizer, an engine that writes what it is given, and scoring by functions alone."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ycore.rollout.dialogue import Dialogue
from ycore.rollout.tool_pool import ToolSet
from ycore.scoring.scoring import RewardPool, RuleScorer, Scoring
from ycore.types import Completion

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "description": "One."},
                "y": {"type": "integer"},
            },
            "required": ["x", "y"],
        },
    },
}
ADDS = ToolSet((ADD,))
GAME = ToolSet((), takes_text=True, pays=True)


def names_of(tool_set: ToolSet) -> list[str]:
    return [tool["function"]["name"] for tool in tool_set.tools]


SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You help<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' +"
    " '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's."""

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|begin_of_text|>",
    ),
    *("<|endoftext|>", "<|python_tag|>"),
)


def shipped(name: str) -> str:
    return files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    """Letters, and pairs of letters as merges: most random token ids become others when they are written and read."""
    lower = [letter for letter in LETTERS if letter.islower()]
    pairs = [(first, second) for first in lower for second in lower]
    vocabulary = {
        token: number for number, token in enumerate([*LETTERS, *(a + b for a, b in pairs)])
    }
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token=end,
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )
    tokenizer.chat_template = template
    return tokenizer


TALKS = {
    "smollm2": (SMOL, "<|im_end|>", "calls"),
    "qwen3": (shipped("qwen3"), "<|im_end|>", "template"),
    "qwen3 in text": (shipped("qwen3"), "<|im_end|>", "calls"),
    "llama3.1": (shipped("llama3_1"), "<|eot_id|>", "template"),
    "llama3": (shipped("llama3"), "<|eot_id|>", "calls"),
}


def dialogue_of(
    name: str, described: ToolSet = ADDS
) -> tuple[PreTrainedTokenizerFast, Dialogue]:
    template, end, actions = TALKS[name]
    tokenizer = tokenizer_of(template, end)
    return tokenizer, Dialogue(tokenizer, described, actions=actions)


def call_text(name: str, x: int, y: int) -> str:
    if TALKS[name][2] == "calls":
        return f"add({x}, y={y})"
    if name == "qwen3":
        return (
            f'<tool_call>\n{{"name": "add", "arguments": {{"x": {x}, "y": {y}}}}}\n</tool_call>'
        )
    return f'{{"name": "add", "parameters": {{"x": {x}, "y": {y}}}}}'


class Writer:
    """In place of an engine: writes given token ids, turn by turn, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[int]]) -> None:
        self._tokenizer, self._turns = tokenizer, list(turns)
        self.asked: list[tuple[list[int], int, int]] = []

    async def __call__(
        self, token_ids: Sequence[int], seed: int, *, max_tokens: int | None = None
    ) -> Completion:
        assert max_tokens is not None and max_tokens > 0
        self.asked.append((list(token_ids), seed, max_tokens))
        whole = list(self._turns.pop(0))
        ids = whole[:max_tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        stops = len(ids) == len(whole)
        return Completion(
            tuple(ids), tuple(-0.5 for _ in ids), text, "stop" if stops else "length", 3
        )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def rules_alone(pool: RewardPool, *, num_sources: int = 1) -> Scoring:
    """The scoring of a run whose rewards are all reward functions."""
    return Scoring([RuleScorer(pool, source) for source in range(num_sources)])
