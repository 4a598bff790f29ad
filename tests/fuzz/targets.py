"""Everything of ycore that reads what others wrote: seeds that are right, and how they are read.

A reader may refuse with one of ycore's own errors. Any other exception, a reading that takes long and one that needs
much memory are defects.
"""

import csv
import gzip
import io
import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from tests.fuzz.mutations import TEXTS, changed_value, mutated
from ycore.api.pipelines import parse_pipeline
from ycore.config.recipe_files import load_recipe
from ycore.config.schema import RewardConfig, RunConfig, TuneConfig
from ycore.config.trl_fields import coerce, fields_of
from ycore.data.examples import load_examples
from ycore.data.generated import parse_name, typed_arguments
from ycore.data.prompts import load_prompts
from ycore.engine.judge_engine import parse_reply, prompt_logprobs
from ycore.errors import YcoreError
from ycore.flow.flow_inputs import FlowFolder
from ycore.foreign import ForeignRefused, foreign_json
from ycore.judge.declaration import Judge, judge_of
from ycore.judge.question import Questioner, verdict_code
from ycore.judge.verdict import Reply, Unreadable, read_ranking, read_value
from ycore.models.names import resolve_model
from ycore.rewards.worker_client import inputs_in, scores_in
from ycore.rollout.agents import CallRejected, read_request
from ycore.run.files import seal
from ycore.run.metrics import read_metrics
from ycore.run.resuming import checkpoint_problem, newest_whole, read_round
from ycore.run.text import printable
from ycore.sandbox.confined_worker import CallFailed, reply_in
from ycore.types import Prompt
from ycore.view.progress import PlainProgress, RunView, follow_run
from ycore.view.report import make_report, read_run, render_page

Draw = Callable[[random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """`read(data, place)` is the reader; `place` is an empty folder. `draw` makes an input from a seed's chance."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes, Path], None]
    draw: Draw | None = None
    rounds: int = 1000
    """Inputs of one test run."""
    flips: bool = True
    """Whether every single bit of the first seed is flipped in a test run."""

    def input(self, chance: random.Random) -> bytes:
        if self.draw is not None and chance.random() < 0.5:
            return self.draw(chance)
        return mutated(chance.choice(self.seeds), chance, tuple(self.seeds))


# -- models ------------------------------------------------------------------------------------------------------------


CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "max_position_embeddings": 128,
    "text_config": {"n_ctx": 5},
}
INDEX = {"metadata": {"total_size": 4}, "weight_map": {"a": "model.safetensors"}}
_HEAD = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
SAFETENSORS = struct.pack("<Q", len(_HEAD)) + _HEAD + b"\0" * 4


def read_weights(data: bytes, place: Path) -> None:
    _model_folder(place, weights=data)


def read_model_settings(data: bytes, place: Path) -> None:
    """The first line is which file it is of."""
    name, _, content = data.partition(b"\n")
    names = {
        b"config": "config.json",
        b"index": "model.safetensors.index.json",
        b"tokenizer": "tokenizer_config.json",
    }
    _model_folder(place, **{names.get(name, "adapter_config.json"): content})


def _model_folder(place: Path, weights: bytes = SAFETENSORS, **files: bytes) -> None:
    (place / "model.safetensors").write_bytes(weights)
    (place / "adapter_model.safetensors").write_bytes(weights)
    (place / "tokenizer.json").write_text("{}")
    if "adapter_config.json" not in files:
        (place / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        (place / name).write_bytes(content)
    resolve_model(str(place))


def _draw_model_settings(chance: random.Random) -> bytes:
    adapter = {
        "base_model_name_or_path": chance.choice((".", "..", "/", "task:x", "", "a/b/c"))
    }
    name, value = chance.choice(
        [
            ("config", CONFIG),
            ("index", INDEX),
            ("tokenizer", {"chat_template": "x"}),
            ("adapter", adapter),
        ]
    )
    return name.encode() + b"\n" + _dump(changed_value(value, chance))


# -- datasets ----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "answer": "2", "level": 1},
    {
        "prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
        "answer": ["x", None],
    },
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Ho",
        "rejected": "\n\nHuman: Hi\n\nAssistant: No",
        "margin": 1.5,
    },
    {
        "messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
        "text": "é",
    },
    {"prompt": "Is it?", "completion": "Yes", "label": True},
]
JSONL = [b"".join(_line + b"\n" for _line in (json.dumps(row).encode(),)) * 3 for row in ROWS]
CSV = b'prompt,answer\n"What, 1 + 1?",2\n"a ""b""\nc",3\n'


@cache
def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.Table.from_pylist(
        [{"prompt": "What is 1 + 1?", "answer": "2", "turns": [{"role": "user"}]}] * 4
    )
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


def read_dataset(suffix: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, place: Path) -> None:
        path = place / f"data{suffix}"
        path.write_bytes(data)
        config = {"model": "m", "dataset": str(path), "output": "out"}
        with suppress(YcoreError):
            run = RunConfig(**config, rewards=[RewardConfig(reward="exact_answer")])
            list(load_prompts(run, as_chat=False).prompts)
        for algorithm in ("sft", "dpo", "kto"):
            with suppress(YcoreError):
                _ = load_examples(
                    TuneConfig(**config, algorithm=algorithm), as_chat=algorithm == "dpo"
                ).identity

    return read


def _draw_rows(chance: random.Random) -> bytes:
    rows = [changed_value(row, chance) for row in chance.choices(ROWS, k=chance.choice((1, 3)))]
    return b"\n".join(map(_dump, rows)) if chance.random() < 0.7 else _dump(rows)


def _draw_csv(chance: random.Random) -> bytes:
    out = io.StringIO()
    cells = [*TEXTS, "prompt", "answer", "1", '"']
    with suppress(csv.Error):
        csv.writer(out).writerows(
            [chance.choices(cells, k=chance.choice((1, 2, 3))) for _ in range(3)]
        )
    return out.getvalue().encode("utf-8", "surrogatepass")


def _dump(value: Any) -> bytes:
    """Write JSON that may hold NaN, half characters and numbers beyond every limit."""
    return json.dumps(
        value, ensure_ascii=random.Random(repr(value)[:50]).random() < 0.5
    ).encode("utf-8", "surrogatepass")


# -- recipes and judges ------------------------------------------------------------------------------------------------

RECIPE = b"""
description: x
model: smollm2-135m
dataset: task:addition
rewards:
  - {reward: exact_answer, weight: 2}
steps: 3
"""
JUDGE = b"""
rubric: Is it right?
verdict: {kind: score, min: 1, max: 5}
scale: [-1, 1]
messages:
  - {role: user, content: '{completion} {rubric} {how_to_answer}'}
"""
BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b", ".join([b"*%c" % (letter - 1)] * 9))
    for letter in b"bcdefghij"
)
YAMLS = (
    BOMB,
    BOMB
    + b"model: smollm2-135m\ndataset: task:addition\nrewards: [{reward: exact_answer, args: {x: *j}}]\n",
    BOMB.replace(b"a: &a", b"trl: &a", 1),
    BOMB + b"verdict: {kind: labels, labels: *j}\n",
    b"model: &a [*a]\n",
    b"model: 2024-99-99\n",
    b"model: !!python/object/apply:os.system ['true']\n",
    b"? [a]\n: b\n",
    b"model: !!binary '@'\n",
    b"model: 0o8\nsteps: 190:20:30\n",
    b"steps: " + b"9" * 5000,
    b"<<: *x\n",
    b"--- a\n--- b\n",
)


def read_recipe(data: bytes, place: Path) -> None:
    from ycore.config.resolve import resolve

    path = place / "recipe.yaml"
    path.write_bytes(data)
    recipe = load_recipe(str(path))
    json.dumps(resolve(recipe=recipe).model_dump(mode="json"))


def read_judge(data: bytes, place: Path) -> None:
    (place / "judge.yaml").write_bytes(data)
    judge = judge_of(RewardConfig(reward=f"judge:{place}/judge.yaml"))
    questioner = Questioner(judge)
    if judge.mode == "pointwise":
        questioner.question(Prompt(0, "x"), "y", key="k")


def _draw_yaml(seed: bytes) -> Draw:
    def draw(chance: random.Random) -> bytes:
        value = changed_value(yaml.safe_load(seed), chance)
        with suppress(yaml.YAMLError, UnicodeError, RecursionError):
            return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
        return seed

    return draw


# -- a run's folder ----------------------------------------------------------------------------------------------------

_COMPLETION = {
    "text": "4",
    "token_ids": [1, 2],
    "logprobs": [-0.5, -0.5],
    "finish_reason": "stop",
    "version": 1,
}
_SCORES = [[{"value": 1.0, "problem": None}], [{"value": None, "problem": "raised"}]]
_PROMPT = {
    "row": 0,
    "content": [{"role": "user", "content": "2 + 2?"}],
    "columns": {"answer": "4"},
}
ROUND = {
    "groups": [
        {
            "draw": {"position": 0, "prompt": _PROMPT},
            "completions": [_COMPLETION] * 2,
            "scores_GR": _SCORES,
        }
    ]
}
_SETTINGS = {
    "algorithm": "grpo",
    "model": "m",
    "dataset": "d",
    "prompts_per_step": 2,
    "rewards": [{"weight": 2.0}],
}
FOLDER: dict[str, Any] = {
    "run.json": {
        "config": _SETTINGS,
        "command": ["ycore", "grpo"],
        "versions": {"torch": "1"},
        "started": "x",
    },
    "engines.json": {"engines": ["rollout-0"]},
    "summary.json": {
        "status": "finished",
        "steps": 1,
        "wall_s": 3.0,
        "reward_first": 0.1,
        "reward_last": 0.2,
    },
    "metrics.jsonl": {
        "step": 1,
        "reward": 0.5,
        "ycore/time/step": 2.0,
        "ycore/time/round": 1.0,
        "ycore/reward_problems": {"x": 1},
    },
    "trace.json": {
        "name": "rollout",
        "ph": "X",
        "ts": 1000,
        "dur": 10,
        "pid": 0,
        "tid": 0,
        "args": {"step": 1},
    },
    "samples.json": {
        "before": [{"prompt": "a", "completion": "b"}],
        "after": [{"prompt": "a", "completion": "c"}],
    },
    "round": ROUND,
}


def read_folder(data: bytes, place: Path) -> None:
    """The first line is which file it is of; the others are right."""
    damaged, _, content = data.partition(b"\n")
    (place / "journal").mkdir()
    for name, value in FOLDER.items():
        text = json.dumps(value).encode()
        if name == "round":
            file, text = (
                place / "journal" / "round-000001-rank-0.json",
                seal({"schema": 1}, value),
            )
        else:
            file = place / name
        if name == "trace.json":
            text = b"[\n" + text + b",\n"
        file.write_bytes(
            content if name.encode() == damaged else text + b"\n" * name.endswith("l")
        )
    read_run(place)


def read_journal(data: bytes, place: Path) -> None:
    path = place / "round-000001-rank-0.json"
    path.write_bytes(data)
    assert read_round(path)[1] == ROUND, "damage that is not found"


def _draw_folder(chance: random.Random) -> bytes:
    name = chance.choice(list(FOLDER))
    value = changed_value(FOLDER[name], chance)
    content = seal({"schema": 1}, value) if name == "round" else _dump(value)
    content = b"[\n" + content + b",\n" if name == "trace.json" else content
    return name.encode() + b"\n" + content


# -- judges' replies ---------------------------------------------------------------------------------------------------

_CODE = verdict_code("k")
REPLIES = [
    f"It is right.\n<score-{_CODE}>7</score-{_CODE}>".encode(),
    f'{{"reason": "good", "score": 7, "code": "{_CODE}"}}'.encode(),
    f'```json\n{{"score": 7, "code": "{_CODE}"}}\n```'.encode(),
    f"<think>7? <score></think><ranking-{_CODE}>1, 2</ranking-{_CODE}>".encode(),
    b"<|im_end|>" * 20 + "\uff1cscore\uff1e".encode(),
]


@cache
def _judges() -> list[Judge]:
    kinds: list[dict[str, Any]] = [
        {"kind": "score"},
        {"kind": "json"},
        {"kind": "json", "reason": True},
        {"kind": "ranking"},
    ]
    return [
        judge_of(
            RewardConfig(
                reward="judge:t",
                args={
                    "verdict": kind,
                    "mode": "groupwise" if kind["kind"] == "ranking" else "pointwise",
                },
            )
        )
        for kind in kinds
    ]


def read_reply(data: bytes, place: Path) -> None:
    text = _text_of(data)
    for judge in _judges():
        questioner = Questioner(judge, ("<|im_end|>",))
        with suppress(Unreadable):
            if judge.mode == "groupwise":
                assert sorted(read_ranking(judge, Reply(text), code=_CODE, count=2)) == [0, 1]
                questioner.question(Prompt(0, text), text, "x", key="k")
            else:
                assert 0 <= read_value(judge, Reply(text), code=_CODE) <= 10
        if judge.mode == "pointwise":
            questioner.question(Prompt(0, "x", {"answer": text}), text, key="k")


def _text_of(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# -- replies of reward workers -----------------------------------------------------------------------------------------

_WORKER_REPLY = {
    "nonce": "5f0c",
    "values": [1.0, None],
    "problems": [None, "raised ValueError"],
    "logged": [{}, {"why": "a"}],
}
WORKER_REPLY = json.dumps(_WORKER_REPLY).encode()


def read_worker_reply(data: bytes, place: Path) -> None:
    with suppress(CallFailed):
        scores = scores_in(reply_in(data, "5f0c"), count=2, allowed_range=(0, 5))
        assert len(scores) == 2 and all(
            score.value is None or 0 <= score.value <= 5 for score in scores
        )
        assert all((score.problem or "").isprintable() for score in scores)
    with suppress(CallFailed):
        inputs_in(reply_in(data, "5f0c").get("ready"), count=1)


def _draw_worker_reply(chance: random.Random) -> bytes:
    return _dump(changed_value(_WORKER_REPLY, chance))


# -- what a person sees ------------------------------------------------------------------------------------------------

HARMLESS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "div",
    "h1",
    "h2",
    "p",
    "table",
    "tr",
    "th",
    "td",
    "span",
    "pre",
}
PICTURES = {
    "svg",
    "g",
    "path",
    "defs",
    "use",
    "rect",
    "clippath",
    "text",
    "tspan",
    "a",
    "img",
    "rdf:rdf",
    "cc:work",
}
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _Page(HTMLParser):
    """Fails on whatever a page could do more than show."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in HARMLESS | PICTURES | {
            "metadata",
            "dc:type",
            "dc:title",
        } or tag.startswith(("dc:", "cc:")), tag
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}>"
            assert name not in ("src", "href") or str(value).startswith(
                ("#", "data:image/png")
            ), f"{name}={value}"


def read_page(data: bytes, place: Path) -> None:
    root = place / NAMES[zlib.crc32(data) % len(NAMES)]
    root.mkdir()
    read_folder(data, root)
    page = render_page(make_report([read_run(root)]))
    _Page().feed(page)
    assert not (match := _UNSEEN.search(page)), f"{match!r} is in the page"


NAMES = [
    "$\\frac{$",
    "_hidden",
    "a$b$c",
    "<b>",
    "x\x1b[2J",
    "half \udc80",
    "\u202eabc",
    "\\$",
    "%s",
    "{{ 7 * 7 }}",
    "plain",
]


def read_rows(data: bytes, place: Path) -> None:
    """Show rows of metrics and texts of models on their way to a terminal."""
    (place / "metrics.jsonl").write_bytes(data)
    rows = read_metrics(place / "metrics.jsonl", say=lambda line: None)
    out, screen = io.StringIO(), io.StringIO()
    plain, view = PlainProgress(3, "step", out), RunView(3)
    for row in rows:
        plain.step(row)
        view.add(row)
    plain.say(_text_of(data))
    Console(file=screen, width=80, color_system=None).print(
        view, Text(printable(_text_of(data)))
    )
    for printed in (out.getvalue(), screen.getvalue()):
        assert not (match := _UNSEEN.search(printed)), f"{match!r} reaches the terminal"
    assert "\n" not in printable(_text_of(data), one_line=True)


def _draw_rows_of_metrics(chance: random.Random) -> bytes:
    return b"".join(
        _dump(changed_value(FOLDER["metrics.jsonl"], chance)) + b"\n" for _ in range(3)
    )


# -- checkpoints, pipelines, words, answers of servers ----------------------------------------------------------------

_MANIFEST = {
    "step": 4,
    "world": 1,
    "files": {
        name: {"bytes": 1, "sha256": "0" * 64}
        for name in ("trainer_state.json", "rng_state.pth", "a.safetensors")
    },
}
MANIFEST = seal({"schema": 2}, _MANIFEST)


def read_manifest(data: bytes, place: Path) -> None:
    checkpoint = place / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(data)
    assert checkpoint_problem(checkpoint), "a file that is not there"
    with suppress(YcoreError):
        newest_whole(place, say=lambda line: None)


def _draw_manifest(chance: random.Random) -> bytes:
    return seal({"schema": 2}, changed_value(_MANIFEST, chance))


PIPELINE = b"""
model: smollm2-135m
stages:
  sft: {dataset: chats.jsonl, steps: 2}
  pairs: {dataset: prompts.jsonl, rewards: [exact_answer]}
  dpo: {dataset: "${pairs.dataset}"}
"""


def read_pipeline(data: bytes, place: Path) -> None:
    path = place / "stages.yaml"
    path.write_bytes(data)
    parse_pipeline(load_recipe(str(path), command="pipeline"), name="stages")


WORDS = [
    b"task:addition?digits=1",
    b"gym:leg_counting?size=3",
    b'{"a": [1]}',
    b"[" * 5000,
    b"task:addition?digits=" + b"[" * 5000,
]


def read_words(data: bytes, place: Path) -> None:
    """Read a dataset's name and a field's value, as a command line or a recipe has them."""
    text = _text_of(data)
    with suppress(YcoreError):
        typed_arguments(parse_name(text)[1])
    for field in {
        tuple(field.kinds): field for field in fields_of("GRPOConfig").values()
    }.values():
        with suppress(YcoreError):
            coerce(field, text)


_CHOICE = {
    "message": {"content": "7"},
    "logprobs": {
        "content": [{"token": "a", "top_logprobs": [{"token": "a", "logprob": -1.0}]}]
    },
    "prompt_logprobs": [None, {"2": {"logprob": -0.5}}],
}
ANSWERS = {"choices": [_CHOICE], "usage": {"total_tokens": 3}}


def read_answer(data: bytes, place: Path) -> None:
    """Read what the address of a judge, a teacher or a tool server sends."""
    with suppress(ForeignRefused):
        answer = foreign_json(data)
        with suppress(ForeignRefused):
            reply = parse_reply(answer)
            reply.text.encode()
            assert reply.num_tokens >= 0
        (logprob,) = prompt_logprobs(answer, [1], [2])
        assert logprob < 1


def _draw_answer(chance: random.Random) -> bytes:
    return _dump(changed_value(ANSWERS, chance))


_CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"name": "f", "description": "x", "parameters": {"properties": {"a": {}}}}
REQUEST = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": _TOOL}],
    "max_tokens": 5,
}


def read_call(data: bytes, place: Path) -> None:
    """Read a call of an agent's client."""
    with suppress(ForeignRefused, CallRejected):
        body = foreign_json(data)
        if isinstance(body, dict):
            request = read_request(body)
            json.dumps(request.messages, ensure_ascii=False).encode()


def _draw_call(chance: random.Random) -> bytes:
    return _dump(changed_value(REQUEST, chance))


_SCHEDULE = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0}
_NETWORK = {
    "_class_name": "UNet2DModel",
    "num_class_embeds": 3,
    "sample_size": 4,
    "in_channels": 1,
}


def read_flow_folder(data: bytes, place: Path) -> None:
    """The first line is the scheduler, the second the network."""
    schedule, _, network = data.partition(b"\n")
    for name, content in (
        ("scheduler/scheduler_config.json", schedule),
        ("unet/config.json", network),
    ):
        (place / name).parent.mkdir()
        (place / name).write_bytes(content)
    FlowFolder(place)


def _draw_flow_folder(chance: random.Random) -> bytes:
    return b"\n".join(_dump(changed_value(value, chance)) for value in (_SCHEDULE, _NETWORK))


def read_as_it_goes_on(data: bytes, place: Path) -> None:
    """Read a run's folder in the terminal."""
    with suppress(YcoreError):
        read_folder(data, place)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            follow_run(place, once=True)
    finally:
        assert not (match := _UNSEEN.search(out.getvalue())), f"{match!r} reaches the terminal"


def targets() -> list[Target]:
    lines = [
        name.encode() + b"\n" + json.dumps(value).encode()
        for name, value in FOLDER.items()
        if name != "round"
    ]
    return [
        Target("safetensors", [SAFETENSORS], read_weights, rounds=2000),
        Target(
            "model-settings",
            [b"config\n" + _dump(CONFIG), b"index\n" + _dump(INDEX)],
            read_model_settings,
            _draw_model_settings,
        ),
        Target("jsonl", JSONL, read_dataset(".jsonl"), _draw_rows, rounds=1500, flips=False),
        Target("json", [_dump(ROWS[:1]), _dump(ROWS[4:])], read_dataset(".json"), _draw_rows),
        Target("csv", [CSV], read_dataset(".csv"), _draw_csv),
        Target("jsonl.gz", [gzip.compress(JSONL[0], mtime=0)], read_dataset(".jsonl.gz")),
        Target("parquet", [parquet()], read_dataset(".parquet"), rounds=800, flips=False),
        Target("recipe", [RECIPE, *YAMLS], read_recipe, _draw_yaml(RECIPE), flips=False),
        Target("judge-file", [JUDGE, *YAMLS], read_judge, _draw_yaml(JUDGE), flips=False),
        Target("round", [seal({"schema": 1}, ROUND)], read_journal, rounds=500),
        Target("run-folder", lines, read_folder, _draw_folder, flips=False),
        Target(
            "worker-reply", [WORKER_REPLY], read_worker_reply, _draw_worker_reply, rounds=2000
        ),
        Target("judge-reply", REPLIES, read_reply, rounds=2000),
        Target(
            "terminal",
            [_dump(FOLDER["metrics.jsonl"]), *JSONL],
            read_rows,
            _draw_rows_of_metrics,
        ),
        Target("live-view", lines, read_as_it_goes_on, _draw_folder, rounds=300, flips=False),
        Target("manifest", [MANIFEST], read_manifest, _draw_manifest, rounds=500),
        Target(
            "pipeline", [PIPELINE, *YAMLS], read_pipeline, _draw_yaml(PIPELINE), flips=False
        ),
        Target("words", WORDS, read_words, rounds=500, flips=False),
        Target("answer", [_dump(ANSWERS)], read_answer, _draw_answer),
        Target("agent-call", [_dump(REQUEST)], read_call, _draw_call),
        Target(
            "flow-folder",
            [b"\n".join(map(_dump, (_SCHEDULE, _NETWORK)))],
            read_flow_folder,
            _draw_flow_folder,
            rounds=500,
        ),
        Target("report-page", lines, read_page, _draw_folder, rounds=15, flips=False),
    ]
