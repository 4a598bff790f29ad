"""From a dataset's name to its prompts: columns, refusals, real datasets, cost, and the order of a run."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from ycore.config.schema import EvalConfig, RewardConfig, RunConfig
from ycore.data.cells import Table
from ycore.data.prompts import (
    MixedRows,
    PromptSet,
    load_prompts,
    row_at,
    row_of_order,
    to_prompts,
)
from ycore.errors import DataError
from ycore.round.sampling import DrawSource, Shard
from ycore.run.files import png_of
from ycore.types import IMAGE_MARK, Prompt

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
COLD = """
import sys, time
from ycore.config.schema import RunConfig
from ycore.data.prompts import load_prompts
begin = time.process_time()
found = load_prompts(RunConfig(model="m", dataset=sys.argv[1], rewards=[{"reward": "r"}], output="o"))
took = time.process_time() - begin
print(len(found.prompts), took, *({"torch", "transformers", "trl", "datasets"} & set(sys.modules)))
"""


def config(dataset: str | Path, **options: Any) -> RunConfig:
    return RunConfig(
        model="m",
        dataset=str(dataset),
        rewards=[RewardConfig(reward="exact_answer")],
        output="o",
        **options,
    )


def load(dataset: str | Path, **options: Any) -> PromptSet:
    return load_prompts(config(dataset, **options))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def real(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"the shared dataset {name} is not on this machine")
    return path


def test_turns_of_an_example_stand_between_system_and_prompt(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "2 + 2?"}\n')
    settings = {
        "model": "m",
        "dataset": str(file),
        "output": "o",
        "rewards": [{"reward": "exact_answer"}],
    }
    for system, before in (
        (None, []),
        ("Be brief.", [{"role": "system", "content": "Be brief."}]),
    ):
        prompt_set = load_prompts(RunConfig(**settings, few_shot=turns, system_prompt=system))
        assert prompt_set.is_chat
        assert prompt_set.prompts[0].content == [
            *before,
            *turns,
            {"role": "user", "content": "2 + 2?"},
        ]
    file.write_text(
        '{"prompt": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "3?"}]}\n'
    )
    content = load_prompts(RunConfig(**settings, few_shot=turns)).prompts[0].content
    assert [turn["content"] for turn in content if isinstance(turn, dict)] == [
        "Mine.",
        "1 + 1?",
        "2",
        "3?",
    ]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": None})
    assert [prompt.content for prompt in load(path, limit=2).prompts] == ["a", "b"]
    assert len(load("task:addition", limit=7).prompts) == 7
    assert len(load("task:addition", limit=700_000).prompts) == 80


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    path = write(tmp_path / "d.jsonl", *rows)
    first = load(path).identity
    assert first == load(path).identity == load(write(tmp_path / "other.jsonl", *rows)).identity
    changed = {
        load(write(tmp_path / "1.jsonl", rows[1], rows[0])).identity,
        load(write(tmp_path / "2.jsonl", rows[0])).identity,
        load(write(tmp_path / "3.jsonl", rows[0], {"prompt": "b", "answer": "3"})).identity,
        load(path, system_prompt="be brief").identity,
        load(path, answer_column="prompt").identity,
    }
    assert len(changed) == 5 and first not in changed


def test_the_fingerprint_takes_what_json_cannot(tmp_path: Path) -> None:
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    row = {
        "prompt": "a",
        "when": datetime.date(2020, 1, 1),
        "cost": decimal.Decimal("1.5"),
        "raw": b"\xff",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    prompt_set = load(tmp_path / "d.parquet")
    assert prompt_set.prompts[0].columns["when"] == row["when"]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "raw": b"\xfe"}]), tmp_path / "e.parquet"
    )
    assert load(tmp_path / "e.parquet").identity != prompt_set.identity


def test_as_chat_and_system_prompt(tmp_path: Path) -> None:
    plain = config("task:addition?size=1")
    assert not load_prompts(plain).is_chat
    assert load_prompts(plain, as_chat=True).is_chat
    briefed = load_prompts(config("task:addition?size=1", system_prompt="Be brief."))
    assert briefed.is_chat and briefed.prompts[0].content[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    again = load_prompts(config("task:addition?size=1", system_prompt="Be brief."))
    assert list(briefed.prompts) == list(again.prompts)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tasks:addition?digits=1", "'task:addition?digits=1'"),
        ("taks:addition", "'task:addition'"),
        ("gyms:chain_sum", "'gym:chain_sum'"),
        ("", "--dataset is empty"),
    ],
)
def test_slips_of_the_pen(name: str, meant: str) -> None:
    with pytest.raises(DataError, match=r"no dataset|is empty") as caught:
        load(name)
    assert meant in str(caught.value)


def test_ten_thousand_rows_are_checked_in_two_seconds_without_torch(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is {n} + {n}? " * 10, "answer": str(2 * n)} for n in range(10_000)
    ]
    path = write(tmp_path / "d.jsonl", *rows)
    done = subprocess.run(
        [sys.executable, "-c", COLD, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    num_rows, seconds, *loaded = done.stdout.split()
    assert (num_rows, loaded) == ("10000", [])
    assert float(seconds) < 2


def test_gsm8k_works_as_it_is() -> None:
    begin = time.process_time()
    prompt_set = load(real("gsm8k/train.jsonl"))
    assert time.process_time() - begin < 10
    assert len(prompt_set.prompts) == 7473 and prompt_set.columns == ("answer",)
    assert all("#### " in prompt.columns["answer"] for prompt in prompt_set.prompts)
    question = prompt_set.prompts[0].content
    assert isinstance(question, str) and question.startswith("Natalia sold clips")


def test_real_preference_pairs_ask_with_what_is_before_the_last_answer() -> None:
    prompt_set = load(real("hh-rlhf/harmless-base-test.jsonl.gz"))
    assert len(prompt_set.prompts) == 2312 and prompt_set.columns == ("rejected",)
    assert all(prompt.content[-1]["role"] == "user" for prompt in prompt_set.prompts)


def test_humaneval_works_as_it_is() -> None:
    prompt_set = load(real("humaneval/HumanEval.jsonl.gz"))
    assert len(prompt_set.prompts) == 164
    assert set(prompt_set.columns) == {"task_id", "canonical_solution", "test", "entry_point"}


def test_a_rank_holds_what_it_draws_and_not_the_dataset(tmp_path: Path) -> None:
    """30 MB of prompts are opened and looked at within a few, and any one of them can be drawn."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for row in range(300):
            file.write(
                json.dumps({"prompt": f"{row} " + "x" * 100_000, "answer": str(row)}) + "\n"
            )
    tracemalloc.start()
    prompts = load(path).prompts
    drawn = prompts[217]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn.columns == {"answer": "217"} and str(drawn.content).startswith("217 xxx")
    assert len(prompts) == 300 and peak < 3_000_000


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


def prompts_of(
    *rows: dict[str, Any], as_chat: bool = False, **options: Any
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    table = Table(
        name="data",
        rows=rows,
        columns=tuple(dict.fromkeys(name for row in rows for name in row)),
    )
    prompt_set = to_prompts(table, config("data", **options), as_chat=as_chat)
    return tuple(prompt_set.prompts), prompt_set.columns


def contents(*rows: dict[str, Any], **options: Any) -> list[Any]:
    return [prompt.content for prompt in prompts_of(*rows, **options)[0]]


def refused_rows(*rows: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        prompts_of(*rows, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["prompt", "question", "problem", "instruction", "query"])
def test_the_asking_column_is_found(name: str) -> None:
    assert contents({"other": "x", name: "hi"}) == ["hi"]


def test_the_first_of_several_asks_and_the_others_are_columns() -> None:
    prompts, columns = prompts_of({"question": "q", "prompt": "p", "answer": "a"})
    assert (prompts[0].content, prompts[0].columns, columns) == (
        "p",
        {"question": "q", "answer": "a"},
        ("question", "answer"),
    )


def test_a_chosen_column_asks() -> None:
    assert contents({"prompt": "p", "chosen": "c"}, prompt_column="chosen") == ["c"]


def test_no_asking_column_lists_what_is_there() -> None:
    message = refused_rows({"text": "a", "label": 1})
    assert "it has text, label" in message and "--prompt-column" in message


def test_a_mistyped_column_names_the_nearest() -> None:
    assert "did you mean 'question'?" in refused_rows(
        {"question": "q"}, prompt_column="qestion"
    )
    assert "did you mean 'solution'?" in refused_rows(
        {"prompt": "q", "solution": "s"}, answer_column="soluton"
    )


def test_the_answer_column_is_renamed_and_wins() -> None:
    prompts, columns = prompts_of(
        {"prompt": "p", "answer": "long", "final": "short"}, answer_column="final"
    )
    assert prompts[0].columns == {"answer": "short"} and columns == ("answer",)


def test_names_that_a_reward_is_called_with_are_not_columns() -> None:
    assert prompts_of(
        {"question": "q", "prompts": 1, "completions": 2, "completion": 3, "kept": 4}
    )[1] == ("kept",)


def test_a_missing_value_is_none() -> None:
    assert prompts_of({"prompt": "a", "answer": "1"}, {"prompt": "b"})[0][1].columns == {
        "answer": None
    }


def test_an_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        load(write(tmp_path / "d.jsonl"))


@pytest.mark.parametrize(
    ("value", "description"),
    [(None, "null"), (3, "int"), (1.5, "float"), ({"role": "user"}, "dict"), (b"x", "bytes")],
)
def test_prompts_of_another_type(value: Any, description: str) -> None:
    assert f"is {description} in row 1 of data" in refused_rows(
        {"prompt": "a"}, {"prompt": value}
    )


@pytest.mark.parametrize("value", ["", "  \n"])
def test_empty_text(value: str) -> None:
    assert "is empty in row 1 of data" in refused_rows({"prompt": "a"}, {"prompt": value})


def test_half_a_character() -> None:
    assert "lone surrogate" in refused_rows({"prompt": "a\ud800"})


def test_text_and_chat_do_not_mix() -> None:
    message = refused_rows({"prompt": "a"}, {"prompt": "b"}, {"prompt": [USER]})
    assert "text in row 0" in message and "chat in row 2" in message
    message = refused_rows({"prompt": [USER]}, {"prompt": "b"})
    assert "chat in row 0" in message and "text in row 1" in message


def test_chat_prompts_keep_role_and_content() -> None:
    assert contents({"prompt": [SYSTEM, {**USER, "name": None}]}) == [[SYSTEM, USER]]


def test_a_conversation_as_sharegpt_writes_it() -> None:
    talk = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
    ]
    assert contents({"conversations": talk}, prompt_column="conversations") == [[SYSTEM, USER]]


def test_the_last_answer_of_a_conversation_is_dropped() -> None:
    assert contents({"messages": [USER, ANSWER, USER, ANSWER]}) == [[USER, ANSWER, USER]]
    assert contents({"messages": [USER]}) == [[USER]]
    assert contents({"talk": [USER, ANSWER]}, prompt_column="talk") == [[USER]]


@pytest.mark.parametrize(
    "talk",
    [
        [USER, ANSWER, USER, ANSWER],
        "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: hi\n\nAssistant: ",
    ],
)
def test_a_pair_of_conversations_asks_with_what_is_before_the_last_answer(talk: Any) -> None:
    (prompt,), names = prompts_of({"chosen": talk, "rejected": talk})
    assert prompt.content == [USER, ANSWER, USER]
    assert names == ("rejected",)


def test_a_pair_of_answers_without_their_conversation_cannot_ask() -> None:
    assert "'chosen' is an answer without its conversation in row 0" in refused_rows(
        {"chosen": "blue", "rejected": "red"}
    )
    assert contents({"chosen": "blue", "rejected": "red", "question": "sky?"}) == ["sky?"]


def test_a_prompt_does_not_end_with_an_answer() -> None:
    assert "ends with an assistant turn in row 0" in refused_rows({"prompt": [USER, ANSWER]})
    assert contents({"messages": [USER, ANSWER, ANSWER]}) == [[USER]]


@pytest.mark.parametrize("value", [[], [ANSWER]])
def test_a_conversation_without_a_question(value: list[Any]) -> None:
    assert "is empty in row 0" in refused_rows({"messages": value})


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("hi", "turn 1 of 'prompt' is str in row 0 of data"),
        (
            {"speaker": "human", "text": "hi"},
            "has speaker: str, text: str in row 0 of data; a turn has role and content",
        ),
        ({"role": "user", "content": None}, "content: NoneType"),
        ({"role": "user", "content": [{"type": "text"}]}, "content: list"),
        ({"role": "", "content": "hi"}, "a turn has role and content"),
        ({}, "has nothing"),
        ({"role": "user", "content": " "}, "turn 1 of 'prompt' is empty in row 0"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
            "ends with an assistant",
        ),
    ],
)
def test_turns_that_are_none(turn: Any, message: str) -> None:
    assert message in refused_rows({"prompt": [USER, turn]})


def test_a_system_prompt_makes_text_a_chat() -> None:
    assert contents({"prompt": "hi"}, system_prompt="be brief") == [[SYSTEM, USER]]


def test_a_system_prompt_goes_before_chats_that_have_none() -> None:
    long_system = {"role": "system", "content": "be long"}
    assert contents(
        {"prompt": [USER]}, {"prompt": [long_system, USER]}, system_prompt="be brief"
    ) == [
        [SYSTEM, USER],
        [long_system, USER],
    ]


def test_a_chat_model_gets_text_as_a_users_turn() -> None:
    assert contents({"prompt": "hi"}, as_chat=True) == [[USER]]
    assert contents({"prompt": [SYSTEM, USER]}, as_chat=True) == [[SYSTEM, USER]]


seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 60)


@given(seed=seeds, num_rows=sizes, epoch=st.integers(0, 5))
def test_every_row_once_an_epoch(seed: int, num_rows: int, epoch: int) -> None:
    rows = [
        row_of_order(seed, num_rows, position)
        for position in range(epoch * num_rows, (epoch + 1) * num_rows)
    ]
    assert sorted(rows) == list(range(num_rows))


@given(seed=seeds, num_rows=sizes, positions=st.lists(st.integers(0, 300), max_size=30))
def test_a_restart_and_a_shard_see_the_same(
    seed: int, num_rows: int, positions: list[int]
) -> None:
    """Whatever was drawn before: the cache of permutations changes nothing."""
    rows = [row_of_order(seed, num_rows, position) for position in range(301)]
    assert [row_of_order(seed, num_rows, position) for position in positions] == [
        rows[position] for position in positions
    ]


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [
            row_of_order(seed, 50, position)
            for position in range(number * 50, number * 50 + 50)
        ]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_a_seed_is_written_down() -> None:
    """A run of last month must resume with the numpy of today."""
    assert [row_of_order(7, 8, position) for position in range(16)] == [
        0,
        6,
        7,
        2,
        4,
        5,
        1,
        3,
        6,
        3,
        1,
        0,
        2,
        4,
        7,
        5,
    ]


def test_positions_count_from_zero() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        row_of_order(0, 3, -1)


SEVERAL = {"env": ["one=a.py:Env", "a.py:Two"]}


def test_of_several_environments_each_row_names_its_own(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl",
        {"environment": "Two", "topic": "owls"},
        {"environment": "one", "topic": ""},
    )
    prompt_set = load(file, **SEVERAL)
    assert [prompt.columns["environment"] for prompt in prompt_set.prompts] == ["Two", "one"]
    assert prompt_set.prompts[0].content == [{"role": "user", "content": ""}], (
        "TRL's placeholder"
    )
    write(file, {"environment": "Two"}, {"environment": "Two"}, {"environment": "a.py:Two"})
    with pytest.raises(
        DataError, match=r"one of one, Two; it is 'a.py:Two' in row 2 \(line 3\) of"
    ):
        load(file, **SEVERAL)
    write(file, {"environment": "Two"}, {"prompt": "2 + 2?"})
    with pytest.raises(DataError, match=r"it is None in .*line 2"):
        load(file, **SEVERAL)
    with pytest.raises(
        DataError, match=r"task:addition has prompt, answer; add the column, or give one --env"
    ):
        load("task:addition", **SEVERAL)


def test_environments_that_ask_need_no_dataset() -> None:
    for env, rows in (
        ("a.py:Env", [{}]),  # its `reset` gets a prompt and nothing else
        (SEVERAL["env"], [{"environment": "one"}, {"environment": "Two"}]),
    ):
        prompt_set = load("", env=env)
        assert [prompt.columns for prompt in prompt_set.prompts] == rows
        assert {str(prompt.content) for prompt in prompt_set.prompts} == {
            "[{'role': 'user', 'content': ''}]"
        }


# -- several datasets --------------------------------------------------------------------------------------------------


class Mixed(MixedRows):
    def __init__(self, sizes: list[int], counts: list[int]) -> None:
        self.sizes, self.counts = sizes, counts


@given(
    seed=seeds,
    num_rows=st.lists(sizes, min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 60), min_size=4, max_size=4),
)
def test_each_dataset_gets_its_share_and_its_epochs(
    seed: int, num_rows: list[int], counts: list[int]
) -> None:
    """In each cycle, and each one's epochs are whole."""
    mixed = Mixed(num_rows, counts[: len(num_rows)])
    rows = [row_at(mixed, seed, position) for position in range(2 * sum(mixed.counts))]
    start = 0
    for size, count in zip(num_rows, mixed.counts, strict=True):
        drawn = [row - start for row in rows if start <= row < start + size]
        start += size
        assert len(drawn) == 2 * count
        times = [drawn.count(row) for row in range(size)]
        assert len(drawn) // size <= min(times) and max(times) <= -(-len(drawn) // size)


def test_datasets_come_in_another_order_in_each_cycle_and_seed() -> None:
    mixed = Mixed([10, 10], [50, 50])

    def first(seed: int, cycle: int) -> tuple[bool, ...]:
        return tuple(row_at(mixed, seed, 100 * cycle + place) < 10 for place in range(100))

    patterns = {first(seed, cycle) for seed in (0, 1) for cycle in (0, 1)}
    assert len(patterns) == 4 and all(sum(pattern) == 50 for pattern in patterns)
    ranks = [sum(first(0, 0)[rank::2]) for rank in (0, 1)]
    assert min(ranks) > 10  # no rank has one dataset alone


def test_rows_of_several_datasets_are_read_by_their_own_columns(tmp_path: Path) -> None:
    write(
        tmp_path / "sums.jsonl", *({"question": f"{n} + 1?", "answer": n + 1} for n in range(3))
    )
    write(tmp_path / "talk.jsonl", {"prompt": "Hello.", "source": "mine", "tone": "kind"})
    settings = {
        "rewards": [{"reward": "exact_answer"}, {"reward": "length"}],
        "mixture": [
            {"dataset": str(tmp_path / "sums.jsonl"), "share": 0.75},
            {"dataset": str(tmp_path / "talk.jsonl"), "share": 0.25, "rewards": ["length"]},
        ],
    }
    mixed = RunConfig.model_validate({**config("both").model_dump(), **settings})
    prompts = load_prompts(mixed)
    assert [len(part.prompts) for part in prompts.parts.values()] == [3, 1]
    assert [prompt.content for prompt in prompts.prompts] == [
        "0 + 1?",
        "1 + 1?",
        "2 + 1?",
        "Hello.",
    ]
    assert [prompt.row for prompt in prompts.prompts] == [0, 1, 2, 3]
    talk = prompts.prompts[-1]
    assert talk.columns == {"source": "mine", "tone": "kind"}
    assert (talk.dataset, prompts.prompts[0].dataset) == ("talk.jsonl", "sums.jsonl")
    assert mixed.unscored == {"sums.jsonl": set(), "talk.jsonl": {0}}
    assert sum(row_at(prompts.prompts, 0, position) == 3 for position in range(100)) == 25
    before = prompts.digest()
    write(tmp_path / "talk.jsonl", {"prompt": "Hello!"})
    assert load_prompts(mixed).digest() != before


def test_datasets_of_chats_and_of_texts_are_not_mixed(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    parts = [
        {"dataset": str(write(tmp_path / "a.jsonl", {"prompt": "hi"}))},
        {"dataset": str(write(tmp_path / "b.jsonl", {"prompt": turns}))},
    ]
    mixed = RunConfig.model_validate({**config("both").model_dump(), "mixture": parts})
    with pytest.raises(DataError, match="some are text; make them alike"):
        load_prompts(mixed)
    assert load_prompts(mixed, as_chat=True).is_chat


def test_ranks_and_a_resumed_run_draw_several_datasets_alike(tmp_path: Path) -> None:
    parts = [
        {
            "dataset": str(
                write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{n}"} for n in range(5)))
            )
        }
        for name in "ab"
    ]
    mixed = RunConfig.model_validate({**config("both").model_dump(), "mixture": parts})

    def source(shard: Shard) -> DrawSource:
        rows = load_prompts(mixed).prompts
        return DrawSource(rows, seed=3, encode=lambda _: (1,), max_prompt_tokens=1, shard=shard)

    def drawn(draws: DrawSource, count: int) -> list[Any]:
        return [draws.draw().prompt.content for _ in range(count)]

    whole = drawn(source(Shard()), 40)
    ranks = [drawn(source(Shard(rank, 2)), 20) for rank in range(2)]
    assert [content for pair in zip(*ranks, strict=True) for content in pair] == whole
    begun, resumed = source(Shard()), source(Shard())
    assert drawn(begun, 13) == whole[:13]
    resumed.load_state_dict(begun.state_dict())
    assert drawn(resumed, 27) == whole[13:]


def scored_pair(file: Path, *, as_chat: bool = True) -> Prompt:
    settings = EvalConfig(
        model="m",
        dataset=str(file),
        output="o",
        rewards=[RewardConfig(reward="length")],
        pairs=True,
    )
    prompt: Prompt = load_prompts(settings, as_chat=as_chat).prompts[0]
    return prompt


def test_the_question_of_a_scored_pair_says_its_system_prompt_and_history_once(
    tmp_path: Path,
) -> None:
    pair = {"prompt": "How?", "chosen": "Fine.", "rejected": "Bad."}
    said = [("user", "Hi"), ("assistant", "Hello"), ("user", "How?")]
    told = write(tmp_path / "told.jsonl", pair | {"system": "Be kind."})
    assert scored_pair(told, as_chat=False).content == "Be kind.\n\nHow?"
    for system in ({}, {"system": "Be kind."}):
        talk = write(tmp_path / "talk.jsonl", pair | {"history": [["Hi", "Hello"]]} | system)
        turns = [(turn["role"], turn["content"]) for turn in scored_pair(talk).content]
        assert turns == [*system.items(), *said]


def test_a_scored_pair_of_parquet_offers_its_tools_as_they_were_written(tmp_path: Path) -> None:
    """Arrow gives every tool the arguments of all, with null."""
    import pyarrow
    import pyarrow.parquet

    tools = [
        {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}}
        for name, argument in (("find", "words"), ("open", "page"))
    ]
    pair = {"prompt": "How?", "chosen": "Fine.", "rejected": "Bad.", "tools": tools}
    file = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([pair]), file)
    assert list(scored_pair(file).tools) == tools


@pytest.mark.parametrize("in_blocks", [True, False])
def test_the_picture_of_a_scored_pair_is_seen(in_blocks: bool, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png_of(Pillow.new("RGB", (2, 2), "red")))
    answers = [[{"role": "assistant", "content": text}] for text in ("Red.", "Blue.")]
    turn: dict[str, Any] = {"role": "user", "content": "Which colour?"}
    pair: dict[str, Any] = {"image": "red.png"}
    if in_blocks:
        text = {"type": "text", "text": turn["content"]}
        turn["content"] = [{"type": "image", "image": "red.png"}, text]
        pair = {}
    pair |= {"chosen": [turn, *answers[0]], "rejected": [turn, *answers[1]]}
    prompt = scored_pair(write(tmp_path / "pairs.jsonl", pair))
    assert prompt.content == [{"role": "user", "content": f"{IMAGE_MARK}Which colour?"}]
    assert len(prompt.images) == 1


def test_scored_answers_are_single_texts(tmp_path: Path) -> None:
    """A call has no text, and would be scored as an empty answer."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    pair = {"prompt": [{"role": "user", "content": "?"}], "chosen": turns, "rejected": "No."}
    with pytest.raises(DataError, match=r"'chosen' calls tools .* row 0 .*write the answer"):
        scored_pair(write(tmp_path / "pairs.jsonl", pair))


def test_the_plan_counts_rows_that_keep_their_own_system_prompt(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in (("system", "A."), ("user", "?"))]
    rows = [{"messages": said}, {"messages": said[1:]}]
    prompts = load(write(tmp_path / "rows.jsonl", *rows), system_prompt="B.")
    assert [prompt.content[0]["content"] for prompt in prompts.prompts] == ["A.", "B."]
    assert prompts.reading["notes"] == [
        "1 x rows keep their own system prompt, not --system-prompt"
    ]


def test_a_reward_of_scored_pairs_gets_the_columns_that_their_questions_say(
    tmp_path: Path,
) -> None:
    said = {"system": "Be kind.", "history": [["Hi", "Hello"]]}
    pair = {"prompt": "How?", "chosen": "Fine.", "rejected": "Bad."} | said
    prompt = scored_pair(write(tmp_path / "pairs.jsonl", pair))
    assert said.items() <= prompt.columns.items()
    assert len(prompt.content) == 4, "and the question says them once"
