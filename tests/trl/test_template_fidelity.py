"""Tokens and masks by the chat templates of published families: ycore's rows give what TRL alone makes of the same rows.

TRL's own templates come from the installed package. The others are written by the formats that their makers publish.
"""

import json
import re
import socket
import string
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trl
from datasets import Dataset
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl import RewardConfig as TrlRewardConfig
from ycore_cli.use import chat

from ycore.api.trained import serve_command
from ycore.config.resolve import resolve
from ycore.config.schema import TuneConfig
from ycore.data.examples import load_examples
from ycore.engine.commands import engine_environment
from ycore.engine.kinds import is_vllm_installed
from ycore.round.assemble import Assembly
from ycore.run.files import RunFolder
from ycore.scoring.model_scorers import reward_model_encoder
from ycore.trl.build import _rows, load_trainer_class
from ycore.types import Prompt

OURS = Path(__file__).parents[1] / "data" / "templates"
THEIRS = Path(trl.__file__).parent / "chat_templates"
# The template's file, then its begin and end tokens, and what the template gets beside the turns.
FAMILIES: dict[str, tuple[Path, str, str, dict[str, Any]]] = {
    "llama3": (THEIRS / "llama3.jinja", "<|begin_of_text|>", "<|eot_id|>", {}),
    "llama3.2": (THEIRS / "llama3_2.jinja", "<|begin_of_text|>", "<|eot_id|>", {}),
    "qwen2.5": (THEIRS / "qwen2_5.jinja", "<|endoftext|>", "<|im_end|>", {}),
    "qwen3": (THEIRS / "qwen3.jinja", "<|endoftext|>", "<|im_end|>", {}),
    "qwen3-closed": (
        THEIRS / "qwen3.jinja",
        "<|endoftext|>",
        "<|im_end|>",
        {"enable_thinking": False},
    ),
    "gemma3": (THEIRS / "gemma3.jinja", "<bos>", "<end_of_turn>", {}),
    "deepseek-r1": (
        THEIRS / "deepseek_r1_distill.jinja",
        "<\uff5cbegin▁of▁sentence\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
        {},
    ),
    "glm4": (THEIRS / "glm4moe.jinja", "[gMASK]", "<|user|>", {}),
    "gpt-oss": (THEIRS / "gptoss.jinja", "<|startoftext|>", "<|return|>", {}),
    "mistral": (OURS / "mistral.jinja", "<s>", "</s>", {}),
    "phi4": (OURS / "phi4.jinja", "<|endoftext|>", "<|im_end|>", {}),
    "smollm2": (OURS / "smollm2.jinja", "<|im_start|>", "<|im_end|>", {}),
    "granite": (
        OURS / "granite.jinja",
        "<|end_of_text|>",
        "<|end_of_text|>",
        {"thinking": True},
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        },
    },
}
_SPECIAL = re.compile(r"<\|[^|<>]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|\[[/A-Za-z]+\]|</?[a-z_]+>")

TRL_TRAINERS: Mapping[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, TrlRewardConfig),
    "kto": (KTOTrainer, KTOConfig),
}


def tokenizer_of(
    family: str | None, *, added: str = "$A", more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a letter, and one for each marker of the family's template and of `more`.

    Without a family it has no template.
    """
    path, begin, end, _ = FAMILIES[family or "llama3"]
    template = path.read_text(encoding="utf-8")
    markers = dict.fromkeys(
        ["<unk>", "<pad>", begin, end, *_SPECIAL.findall("".join([template, *more]))]
    )
    vocabulary = {token: number for number, token in enumerate([*markers, *string.printable])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=list(markers),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = None if family is None else template
    ids = [(token, vocabulary[token]) for token in added.split() if token != "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=added, special_tokens=ids
    )
    return tokenizer


def tokens_of(trainer: Any) -> list[str]:
    """Return what the trainer is given of every row, in no order: token ids, masks and labels."""
    names = [name for name in trainer.train_dataset.column_names if name.endswith(_GIVEN)]
    assert names
    rows = [{name: row[name] for name in names} for row in trainer.train_dataset]
    return sorted(json.dumps(row) for row in rows)


_GIVEN = ("ids", "mask", "masks", "labels", "label")


def model_of(tokenizer: PreTrainedTokenizerFast, algorithm: str, folder: Path) -> str:
    """Write a random model with the tokenizer's vocabulary, and return its folder."""
    kind = LlamaForSequenceClassification if algorithm == "reward" else LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    return str(folder)


def trained_alike(
    tmp_path: Path,
    algorithm: str,
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    **arguments: Any,
) -> None:
    """Compare what ycore's trainer and TRL's make of the same rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = resolve(
        options={
            "algorithm": algorithm, "model": "m", "dataset": str(file), "output": str(tmp_path / "run"),
            "held_out": 0, "trl": arguments,
        }
    )  # fmt: skip
    assert isinstance(config, TuneConfig)
    examples = load_examples(config, as_chat=tokenizer.chat_template is not None)
    ours = trainer_on(
        load_trainer_class(config), tmp_path, algorithm, tokenizer, arguments,
        _rows(examples.train, RunFolder(tmp_path / "run")),
    )  # fmt: skip
    trainer, _ = TRL_TRAINERS[algorithm]
    theirs = trainer_on(
        trainer, tmp_path, algorithm, tokenizer, arguments, Dataset.from_list(list(rows))
    )
    assert tokens_of(ours) == tokens_of(theirs)


def trainer_on(
    trainer: Any,
    tmp_path: Path,
    algorithm: str,
    tokenizer: PreTrainedTokenizerFast,
    arguments: dict[str, Any],
    rows: Dataset,
) -> Any:
    _, config = TRL_TRAINERS[algorithm]
    batch = {"per_device_train_batch_size": 2} if algorithm == "kto" else {}
    settings = config(
        output_dir=str(tmp_path / "trl"), report_to="none", use_cpu=True, bf16=False, max_length=None,
        gradient_checkpointing=False, **batch, **arguments,
    )  # fmt: skip
    return trainer(
        model=model_of(tokenizer, algorithm, tmp_path / algorithm),
        args=settings,
        processing_class=tokenizer,
        train_dataset=rows,
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PROMPTS = (
    [user("What is 2 + 3?")],
    [{"role": "system", "content": "Add."}, user("1 + 1"), assistant("2"), user("and 2 + 2?")],
)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations(family: str, tmp_path: Path) -> None:
    """Prompt and completion, preferences, and labelled answers, as turns."""
    tokenizer = tokenizer_of(family)
    arguments = FAMILIES[family][3]
    more = {"chat_template_kwargs": arguments} if arguments else {}
    answers = [
        {"prompt": turns, "completion": [assistant("It is 5.")], **more} for turns in PROMPTS
    ]
    pairs = [
        {"prompt": turns, "chosen": [assistant("5")], "rejected": [assistant("six")], **more}
        for turns in PROMPTS
    ]
    whole = [
        {"chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]], **more}
        for row in pairs
    ]  # fmt: skip
    labelled = [{**row, "label": number == 0} for number, row in enumerate(answers)]
    trained_alike(tmp_path, "sft", answers, tokenizer)
    trained_alike(tmp_path, "dpo", pairs, tokenizer)
    trained_alike(tmp_path, "dpo", whole, tokenizer)
    trained_alike(tmp_path, "reward", pairs, tokenizer)
    trained_alike(tmp_path, "kto", labelled, tokenizer)


@pytest.mark.parametrize(
    "family", ["llama3.2", "qwen2.5", "qwen3", "glm4", "gpt-oss", "granite"]
)
def test_tools_and_reasoning(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family)
    key = "thinking" if family == "gpt-oss" else "reasoning_content"
    more = {} if family in ("llama3.2", "qwen2.5") else {key: "2 and 3"}
    other = assistant("5", **{key: "a guess"}) if more else assistant("6")
    answers = [{"prompt": PROMPTS[0], "completion": [assistant("5", **more)], "tools": [TOOL]}]
    trained_alike(tmp_path, "sft", answers, tokenizer)
    pairs = [
        {
            "prompt": PROMPTS[0],
            "chosen": [assistant("5", **more)],
            "rejected": [other],
            "tools": [TOOL],
        }
    ]
    trained_alike(tmp_path, "dpo", pairs, tokenizer)
    trained_alike(tmp_path, "reward", pairs, tokenizer)


@pytest.mark.parametrize("family", ["llama3", "qwen2.5", "qwen3", "gemma3", "glm4", "gpt-oss"])
def test_all_answers_of_a_conversation(family: str, tmp_path: Path) -> None:
    """TRL's `assistant_only_loss`, by its training templates."""
    rows = [{"messages": [*turns, assistant("It is 5.")]} for turns in PROMPTS]
    trained_alike(tmp_path, "sft", rows, tokenizer_of(family), assistant_only_loss=True)


@pytest.mark.parametrize("added", ["$A", "<|begin_of_text|> $A", "$A <|eot_id|>"])
def test_texts(added: str, tmp_path: Path) -> None:
    """The standard forms, for a model without a chat template."""
    tokenizer = tokenizer_of(None, added=added)
    question = {"prompt": "2 + 3 is"}
    trained_alike(tmp_path, "sft", [{"text": "2 + 3 is 5"}], tokenizer)
    trained_alike(tmp_path, "sft", [{**question, "completion": " 5"}], tokenizer)
    pair = {**question, "chosen": " 5", "rejected": " 6"}
    trained_alike(tmp_path, "dpo", [pair], tokenizer)
    trained_alike(tmp_path, "reward", [pair], tokenizer)
    labelled = [{**question, "completion": f" {n}", "label": n == 5} for n in (5, 6)]
    trained_alike(tmp_path, "kto", labelled, tokenizer)


@pytest.mark.parametrize("family", ["llama3.2", "qwen3", "glm4", "granite"])
def test_a_reward_model_is_asked_with_the_rows_tools(family: str, tmp_path: Path) -> None:
    """The tokens of `rm:` in a run are those of RewardTrainer, for a row with tools and template arguments."""
    tokenizer = tokenizer_of(family)
    pair = {"prompt": PROMPTS[0], "chosen": [assistant("5")], "rejected": [assistant("6")]}
    row = {**pair, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    rows = Dataset.from_list([row])
    trainer = trainer_on(RewardTrainer, tmp_path, "reward", tokenizer, {}, rows)
    prompt = Prompt(
        0, PROMPTS[0], tools=(TOOL,), template_arguments=row["chat_template_kwargs"]
    )
    assert trainer.train_dataset[0]["chosen_ids"] == reward_model_encoder(tokenizer)(
        prompt, "5"
    )


def grpo_tokens(tokenizer: PreTrainedTokenizerFast, prompt: Prompt, family: str) -> list[int]:
    """Return what a run's engines get for this prompt."""
    arguments = {"chat_template_kwargs": FAMILIES[family][3]}
    run = SimpleNamespace(
        config=SimpleNamespace(trl=arguments),
        tokenizer=tokenizer,
        dialogues=SimpleNamespace(tool_sets={}),
    )
    return list(Assembly.encode(run, prompt))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_runs_prompts_are_a_chats(family: str) -> None:
    """They are also what TRL makes of the same prompt for GRPO: one call of the tokenizer."""
    tokenizer = tokenizer_of(family)
    for turns in PROMPTS:
        chat = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, **FAMILIES[family][3]
        )
        assert grpo_tokens(tokenizer, Prompt(0, turns), family) == chat["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_runs_prompts_are_those_of_ycore_chat(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first turns and template arguments come from the run's folder."""
    tokenizer = tokenizer_of(family)
    run = RunFolder(tmp_path)
    model_of(tokenizer, "sft", run.model)
    tokenizer.save_pretrained(run.model)
    trained = {
        "algorithm": "grpo",
        "system_prompt": "Add.",
        "few_shot": PROMPTS[1][1:3],
        "trl": {"chat_template_kwargs": FAMILIES[family][3]},
    }
    run.config.write_text(json.dumps({"config": trained}))
    input_ids: list[list[int]] = []
    generate = LlamaForCausalLM.generate

    def asking(model: Any, **options: Any) -> Any:
        input_ids.append(options["input_ids"][0].tolist())
        return generate(model, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", asking)
    chat(str(tmp_path), prompt=["and 2 + 2?", "more"], max_tokens=1)
    assert input_ids[0] == list(grpo_tokens(tokenizer, Prompt(0, PROMPTS[1]), family))
    assert len(input_ids) == 2


ROWS_OF_SERVERS: list[tuple[Sequence[dict[str, Any]], list[dict[str, Any]]]] = [
    *((turns, []) for turns in PROMPTS),
    (PROMPTS[0], [TOOL]),
    (
        [
            *PROMPTS[0],
            assistant(
                "",
                tool_calls=[
                    {
                        "type": "function",
                        "id": "call12345",
                        "function": {"name": "add", "arguments": {"x": 2, "y": 3}},
                    }
                ],
            ),
            {"role": "tool", "content": "5", "tool_call_id": "call12345"},
            user("Is it odd?"),
        ],
        [TOOL],
    ),
    ([*PROMPTS[0], assistant("5", reasoning_content="2 and 3"), user("Is it odd?")], []),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """Start a server as `ycore serve` does, which also takes templates, and yield its address and its tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = tokenizer_of(
        "llama3", more=[path.read_text() for path, *_ in FAMILIES.values()]
    )
    model_of(tokenizer, "sft", folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, spec = serve_command(
        folder, name="m", host="127.0.0.1", port=port, template_arguments={}
    )
    process = subprocess.Popen(
        [*words, "--trust-request-chat-template"], env=engine_environment(spec)
    )
    address = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 300
    try:
        while not _is_up(address):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.5)
        yield f"{address}/v1/chat/completions", tokenizer
    finally:
        process.terminate()
        process.wait(60)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.verify
@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_runs_prompts_are_a_servers(family: str, served: tuple[str, Any]) -> None:
    """vLLM, which also serves judges: the tokens that it says it was asked with."""
    address, tokenizer = served
    path, *_, arguments = FAMILIES[family]
    tokenizer.chat_template = path.read_text()
    num_alike = 0
    for turns, tools in ROWS_OF_SERVERS:
        prompt = Prompt(0, list(turns), tools=tuple(tools))
        try:
            ours = grpo_tokens(tokenizer, prompt, family)
        except (TemplateError, TypeError):
            continue  # the template takes no such turns
        body = {
            "messages": [_as_sent(turn) for turn in turns],
            "chat_template": tokenizer.chat_template,
            "chat_template_kwargs": arguments,
            "max_tokens": 1,
            "return_token_ids": True,
            **({"tools": tools, "tool_choice": "none"} if tools else {}),
        }
        reply = httpx.post(address, json=body, timeout=60)
        assert reply.is_success, reply.text
        assert tokenizer.decode(reply.json()["prompt_token_ids"]) == tokenizer.decode(ours)
        assert reply.json()["prompt_token_ids"] == ours
        num_alike += 1
    assert num_alike >= 3


def _as_sent(turn: dict[str, Any]) -> dict[str, Any]:
    """Write a turn as OpenAI's interface has it: arguments of calls as JSON in a text, thinking as `reasoning`."""
    sent = {"reasoning" if key == "reasoning_content" else key: turn[key] for key in turn}
    if "tool_calls" in turn:
        functions = [
            {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            for call in turn["tool_calls"]
        ]
        sent["tool_calls"] = [
            {**call, "function": function}
            for call, function in zip(turn["tool_calls"], functions, strict=True)
        ]
    return sent
