import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image as Pillow

from tests.scoring.pools import StartedPool, pool_in, rows_of
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.errors import RewardError
from ycore.placement.slots import Slots
from ycore.rewards.worker_client import check_reward
from ycore.round.meters import collect
from ycore.run.files import ImageStore, RunFolder, png_of
from ycore.sandbox import Level
from ycore.scoring.scoring import PendingGroup, RuleScorer, Scoring
from ycore.types import IMAGE_MARK, Completion, Content, Draw, Prompt, Score

REWARDS = """
import ctypes, datetime, os, subprocess, sys, time

def good(completions, **columns):
    return [float(len(text)) for text in completions]

def by_text(completions, **columns):
    scores = []
    for text in completions:
        if text == "hang":
            subprocess.Popen(["tail", "-f", "/dev/null", os.getcwd()])
            while True:
                time.sleep(60)
        if text == "raise":
            raise ValueError("bad text")
        if text == "_exit":
            os._exit(0)
        if text == "sys.exit":
            sys.exit(1)
        if text == "crash":
            ctypes.string_at(0)
        if text == "print":
            print("x" * 100_000)
            sys.stdout.write('{"id": 1, "values": [9], "problems": [null]}\\n')
            os.write(1, b'{"id": 1, "values": [9.0], "problems": [null]}\\n')
            subprocess.run(["echo", "from a child"], check=True)
        if text == "read":
            sys.stdin.read()
        if text == "fork" and os.fork() == 0:
            pass
        scores.append({"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0"}.get(text, 1.0))
    return scores if "short" not in completions else [1.0]

def environment(completions, name, **columns):
    return [float(os.environ.get(key, "-1") != "-1") for key in name]

def sums(completions, completion_ids, answer):
    return [float(sum(ids)) + answer for ids, answer in zip(completion_ids, answer)]

def dated(completions, when):
    return [1.0 for _ in when]

def sees(prompts, completions, images):
    kinds = [block["type"] for block in prompts[0][0]["content"]]
    assert kinds == ["image", "text"], kinds
    assert images[0][0].mode == "RGB" and not os.path.exists("secret/run.json")
    return [float(one.getpixel((0, 0))[0]) for (one,) in images]

def counts_pictures(completions, images):
    return [float(len(pictures)) for pictures in images]

def in_a_chat(prompts, completions):
    return [float(p[-1]["content"] + c[0]["content"]) for p, c in zip(prompts, completions)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pool_of(
    *functions: str,
    deadline_s: float = 10.0,
    workers: int = 2,
    args: dict[str, Any] | None = None,
) -> StartedPool:
    specs = [
        RewardConfig(
            reward=name if name in ("length", "exact_answer") else f"their_rewards.py:{name}",
            args=args or {},
        )
        for name in functions
    ]
    settings = RewardSettings(workers=workers, deadline_s=deadline_s)
    return pool_in(Path("run"), *specs, settings=settings)


async def score(pool: StartedPool, completions: list[Any], **columns: Any) -> list[list[Score]]:
    prompts: list[Content] = ["?"] * len(completions)
    ids = [[1, 2]] * len(completions)
    return await rows_of(pool, prompts, completions, ids, columns)


def scored(pool: StartedPool, completions: list[Any], **columns: Any) -> Any:
    async def run() -> list[list[Score]]:
        async with pool:
            return await score(pool, completions, **columns)

    return bounded(run())


def bounded(coroutine: Coroutine[Any, Any, Any], *, limit_s: float = 300.0) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(limit_s):
            return await coroutine

    return asyncio.run(run())


def started_by_rewards(folder: Path) -> list[int]:
    """Return the pids of processes with the folder in their command line, as `by_text` starts them."""
    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(folder) in (p.info["cmdline"] or [])
    ]


def workers() -> list[psutil.Process]:
    """Return the reward workers under this process; what other tests of the session have started is not ours."""
    children = [
        c
        for c in psutil.Process().children(recursive=True)
        if c.status() != psutil.STATUS_ZOMBIE
    ]
    return [child for child in children if "ycore.rewards.worker" in child.cmdline()]


def alive(folder: Path) -> list[int]:
    """Return the workers under this process, and what a reward left running."""
    return [worker.pid for worker in workers()] + started_by_rewards(folder)


def test_every_source_scores_every_completion(folder: Path) -> None:
    scores = scored(pool_of("good", "sums"), ["a", "bb"], answer=[1, 2])
    assert scores == [[Score(1.0), Score(4.0)], [Score(2.0), Score(5.0)]]


def test_a_reward_of_another_dataset_is_not_called(folder: Path) -> None:
    """`sums` would fail: the row has no `answer`."""

    async def run() -> list[list[Score]]:
        async with pool_of("sums", "good") as pool:
            rules = [RuleScorer(pool, 0), RuleScorer(pool, 1)]
            scoring = Scoring(rules, unscored={"": {0}})
            written = asyncio.create_task(
                asyncio.sleep(0, Completion((1,), None, "a", "stop", 0))
            )
            draw = Draw(0, Prompt(0, "?", {"answer": None}), (1,))
            return await scoring.score(PendingGroup(draw, [written], 1, Slots(1)))

    assert bounded(run()) == [[Score(None), Score(1.0)]]


def test_chat_turns_arrive_as_they_are(folder: Path) -> None:
    async def run() -> list[list[Score]]:
        async with pool_of("in_a_chat") as pool:
            prompts: list[Content] = [[{"role": "user", "content": "4"}]]
            return await rows_of(
                pool, prompts, [[{"role": "assistant", "content": "2"}]], [[1]], {}
            )

    assert bounded(run()) == [[Score(42.0)]]


def test_a_reward_gets_pictures_and_sees_nothing_else_of_the_run(folder: Path) -> None:
    run = RunFolder(folder / "secret")
    store = ImageStore(run.images)
    image = store.put(png_of(Pillow.new("RGB", (2, 2), (200, 0, 0))), "row 0")
    run.config.write_text("{}")
    spec = RewardConfig(reward="their_rewards.py:sees")
    pool = pool_in(run.root, spec)
    prompt = Prompt(
        0, [{"role": "user", "content": f"{IMAGE_MARK}Which colour?"}], {}, (image,)
    )

    async def run_it() -> list[Score]:
        written = [
            asyncio.create_task(asyncio.sleep(0, Completion((1,), None, "red", "stop", 0)))
            for _ in range(2)
        ]
        async with pool:
            return await RuleScorer(pool, 0, store).score(
                PendingGroup(Draw(0, prompt, (1,)), written, 1, Slots(1))
            )

    assert bounded(run_it()) == [Score(200.0), Score(200.0)]


def test_a_prompt_without_pictures_has_none(folder: Path) -> None:
    """Other rows of the dataset have some, so the reward asks for them."""
    assert scored(pool_of("counts_pictures"), ["a", "b"]) == [[Score(0.0)], [Score(0.0)]]


@pytest.mark.parametrize(
    ("guilty", "problem"),
    [
        ("hang", "timeout after 1 s"),
        ("raise", "raised ValueError: bad text"),
        ("_exit", "worker died (exit status 0)"),
        ("sys.exit", "raised SystemExit: 1"),
        ("crash", "worker died (signal 11)"),
        ("inf", "not finite: inf"),
        ("text", "not a number: the str '1.0'"),
    ],
)
def test_only_the_guilty_item_of_the_guilty_source_is_masked(
    folder: Path, guilty: str, problem: str
) -> None:
    pool = pool_of("by_text", "good", deadline_s=1.0 if guilty == "hang" else 30.0)
    scores = scored(pool, ["a", guilty, "b"])
    assert [row[0] for row in scores] == [Score(1.0), Score(None, problem), Score(1.0)]
    assert [row[1].value for row in scores] == [1.0, float(len(guilty)), 1.0]
    assert alive(folder) == []


@pytest.mark.parametrize("harmless", ["none", "nan"])
def test_not_applicable_is_no_problem(folder: Path, harmless: str) -> None:
    pool = pool_of("by_text")
    assert scored(pool, ["a", harmless]) == [[Score(1.0)], [Score(None)]]


def test_a_wrong_length_is_found_item_by_item(folder: Path) -> None:
    # With "short" in the group the function returns one value for it all; alone, that is the right number of them.
    assert scored(pool_of("by_text"), ["a", "short", "b"]) == [
        [Score(1.0)],
        [Score(1.0)],
        [Score(1.0)],
    ]


@pytest.mark.parametrize("text", ["print", "read", "fork"])
def test_printing_reading_and_forking_cannot_touch_the_protocol(
    folder: Path, text: str
) -> None:
    async def run() -> list[list[list[Score]]]:
        async with pool_of("by_text", workers=1) as pool:
            return [await score(pool, ["a", text]), await score(pool, ["b"])]

    assert bounded(run()) == [[[Score(1.0)], [Score(1.0)]], [[Score(1.0)]]]
    if text == "print":
        log = (folder / "run/logs/rewards.log").read_text()
        assert "x" * 100_000 in log and "from a child" in log
    assert alive(folder) == []


def test_a_worker_sees_no_secret_and_its_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("LC_NUMERIC", "C")
    names = ["HF_TOKEN", "OPENAI_API_KEY", "PATH", "LC_NUMERIC", "YCORE_RUN"]
    scores = scored(pool_of("environment"), ["?"] * 5, name=names)
    assert [row[0].value for row in scores] == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_many_groups_with_bad_items_never_starve_the_pool(folder: Path) -> None:
    groups = [["a", "raise"], ["_exit", "b"], ["hang"], ["c", "d"]] * 3

    async def run() -> list[list[list[Score]]]:
        async with pool_of("by_text", deadline_s=1.0) as pool:
            return list(await asyncio.gather(*(score(pool, list(group)) for group in groups)))

    for group, scores in zip(groups, bounded(run()), strict=True):
        assert [row[0].value is None for row in scores] == [
            text in ("raise", "_exit", "hang") for text in group
        ]
    assert alive(folder) == []


def test_workers_that_were_started_again_are_counted(folder: Path) -> None:
    async def run() -> list[float]:
        seen: list[float] = []
        async with pool_of("by_text", workers=1) as pool:
            for group in (["a"], ["raise"], ["_exit"], ["b"]):
                await score(pool, group)
                seen += pool.take()
        return seen

    assert bounded(run()) == [0, 0, 0, 1]


@pytest.mark.parametrize("which", [0, -1])
def test_a_worker_that_was_killed_while_idle_costs_nothing(folder: Path, which: int) -> None:
    async def run() -> list[list[Score]]:
        async with pool_of("good", workers=1) as pool:
            started = workers()
            started[
                which
            ].kill()  # what was started, or the Python in the sandbox, which ends the others too
            while any(psutil.pid_exists(worker.pid) for worker in started):
                await asyncio.sleep(0.01)
            return await score(pool, ["a"])

    assert bounded(run()) == [[Score(1.0)]]


def test_a_column_that_json_cannot_carry_stops_only_who_needs_it(folder: Path) -> None:
    scores = scored(pool_of("good", "dated"), ["a"], when=[object()])
    assert scores[0][0] == Score(1.0)
    assert (
        scores[0][1].problem is not None
        and "column 'when' cannot be sent" in scores[0][1].problem
    )


def test_a_builtins_setting_is_not_taken_from_a_column_of_its_name(folder: Path) -> None:
    assert scored(pool_of("length", args={"target": 2}), ["two words"], target=["9"]) == [
        [Score(1.0)]
    ]


def test_a_reward_that_cannot_be_loaded_is_an_error_that_says_why(folder: Path) -> None:
    with pytest.raises(
        RewardError, match=r"3 attempts: .*has no 'absent' to call.*rewards\.log"
    ):
        scored(pool_of("absent"), ["a"])
    assert alive(folder) == []


def test_closing_in_the_middle_of_a_call_leaves_no_process(folder: Path) -> None:
    async def run() -> None:
        pool = pool_of("by_text", deadline_s=60.0)
        await pool.start()
        call = asyncio.create_task(score(pool, ["hang"]))
        while not started_by_rewards(folder):
            await asyncio.sleep(0.02)
        await pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await score(pool, ["a"])
        await asyncio.gather(call, return_exceptions=True)

    bounded(run())
    assert alive(folder) == []


def test_a_cancelled_call_does_not_answer_the_next(folder: Path) -> None:
    async def run() -> list[list[Score]]:
        async with pool_of("by_text", deadline_s=60.0, workers=1) as pool:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await score(pool, ["hang"])
            return await score(pool, ["a"])

    assert bounded(run()) == [[Score(1.0)]]
    assert alive(folder) == []


def test_workers_die_with_a_parent_that_is_killed(folder: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\n"
        "from ycore.config.schema import RunConfig\n"
        "from ycore.run.files import RunFolder\n"
        "from ycore.scoring.scoring import RewardPool\n"
        "config = RunConfig(model='m', dataset='d', output='run', reward_workers={'workers': 1},\n"
        "                   rewards=[{'reward': 'their_rewards.py:by_text'}])\n"
        "async def main():\n"
        "    pool = RewardPool(config, RunFolder(pathlib.Path('run')), config.rewards)\n"
        "    await pool.start()\n"
        "    print('started', flush=True)\n"
        "    offered = {'prompts': ['?'], 'completions': ['read'], 'completion_ids': [[1]]}\n"
        "    await pool.score(0, offered, step=0)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
    end = time.monotonic() + 10
    while (
        worker.is_running()
        and worker.status() != psutil.STATUS_ZOMBIE
        and time.monotonic() < end
    ):
        time.sleep(0.02)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


DAEMON = """
import subprocess, sys
start = "import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True, env={{}})"
subprocess.Popen([sys.executable, "-c", start], start_new_session=True, env={{}}).wait()

def score(completions, **columns):
    return [1.0 for _ in completions]
"""


def test_a_daemon_that_left_every_group_ends_with_the_worker_and_with_the_check(
    tmp_path: Path,
) -> None:
    seconds = str(100_000 + os.getpid())  # recognised by its argument
    file = tmp_path / "daemon.py"
    file.write_text(DAEMON.format(seconds=seconds))
    spec = RewardConfig(reward=f"{file}:score")

    def living() -> list[int]:
        return [
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if p.info["cmdline"] == ["sleep", seconds]
        ]

    check_reward(spec, [])
    wait_until_gone(living)

    async def work() -> None:
        settings = RewardSettings(workers=1)
        async with pool_in(tmp_path / "run", spec, settings=settings):
            assert living(), "the reward had started none"

    asyncio.run(work())
    wait_until_gone(living)


def wait_until_gone(living: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + 120
    while living():
        assert time.monotonic() < deadline, "a daemon of the reward lives on"
        time.sleep(0.05)


def test_restarts_are_added_over_ranks_and_the_sandbox_level_is_not() -> None:
    pool = pool_of("length")
    for level, number in ((Level.NAMESPACES, 2), (Level.LANDLOCK, 1), (Level.NONE, 0)):
        pool.level = level
        metrics = collect([pool], lambda counts: [6.0 for _ in counts])
        assert metrics == {"ycore/reward_restarts": 6.0, "ycore/sandbox_level": number}
