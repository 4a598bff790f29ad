"""Whole runs of the trainer role, in a process of its own, over transformers' generation: no engine to start."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_tiny_model
from ycore.config.learners import GroupConfig
from ycore.config.schema import (
    EngineSettings,
    LoraSettings,
    RewardConfig,
    RewardSettings,
)
from ycore.round.journal import Journal
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.metrics import read_metrics
from ycore.run.reports import is_alive

REWARD = """
def spread(completion_ids, answer):
    return [sum(ids) % 7 / 7 + float(a) for ids, a in zip(completion_ids, answer)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run_folder(tmp_path: Path, model: Path, **settings: Any) -> RunFolder:
    """Write what the launcher leaves for the trainer: a config, and where it generates."""
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n % 2)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "their_rewards.py").write_text(REWARD)
    folder = RunFolder(tmp_path / "run")
    for path in (folder.root, folder.logs, folder.checkpoints):
        path.mkdir()
    config = GroupConfig.model_validate(
        {
            "model": str(model),
            "dataset": str(tmp_path / "rows.jsonl"),
            "rewards": [RewardConfig(reward=f"{tmp_path / 'their_rewards.py'}:spread")],
            "output": str(folder.root),
            "prompts_per_step": 2,
            "group_size": 4,
            "max_tokens": 8,
            "steps": 2,
            "dtype": "float32",
            "engine": EngineSettings(kind="transformers"),
            "reward_workers": RewardSettings(workers=1),
            "trl": {"learning_rate": 1e-2},
            **settings,
        }
    )
    write_json_atomic(folder.config, {"config": config.model_dump(mode="json")})
    engines = {"kind": "transformers", "engines": [], "model": str(model), "max_model_len": 64}
    write_json_atomic(folder.root / "engines.json", engines)
    return folder


def start(folder: RunFolder) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "ycore.trainer", str(folder.root)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def ended() -> Iterator[list["subprocess.Popen[str]"]]:
    """Trainers put here are killed with all that they started."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate(timeout=60)


def finish(folder: RunFolder, ended: list["subprocess.Popen[str]"]) -> tuple[int, str]:
    process = start(folder)
    ended.append(process)
    _, stderr = process.communicate(timeout=600)
    return process.returncode, stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def write_brief_model(folder: Path) -> Path:
    """Write a random model that ends soon: it seldom writes its one end token, so that it has many."""
    model = write_tiny_model(folder / "model")
    ends = [2, *range(10, 50)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return model


@pytest.mark.parametrize(
    "lora",
    [pytest.param(True, id="lora"), pytest.param(False, id="full", marks=pytest.mark.verify)],
)
def test_a_run_leaves_its_model_metrics_and_samples(
    tmp_path: Path, model: Path, lora: bool, ended: list["subprocess.Popen[str]"]
) -> None:
    settings = {"lora": LoraSettings(r=4) if lora else None, "merge": lora}
    folder = run_folder(tmp_path, model, **settings)
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    names = {
        "reward",
        "loss",
        "grad_norm",
        "rewards/spread/mean",
        "ycore/time/sync",
        "ycore/time/round",
    }
    assert (names | {"ycore/time/train", "ycore/time/step", "ycore/tokens_per_s"}) <= rows[
        0
    ].keys()
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["ycore/time/train"] > 0 for row in rows)
    samples = json.loads(folder.samples.read_text())
    assert [sample["row"] for sample in samples["before"]] == [
        sample["row"] for sample in samples["after"]
    ]
    assert len(samples["before"]) == 4
    check_model(folder, model, lora=lora)


@pytest.mark.verify
def test_a_policy_is_trained_as_a_judge_of_pairs(
    tmp_path: Path, model: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    """A random model writes no verdict: agreement is 0 and counted, and the reward beside it teaches."""
    rows = [
        {"prompt": f"{n}?", "chosen": "a", "rejected": "b", "answer": "1"} for n in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {
        "mode": "pairwise",
        "verdict": {"kind": "score"},
        "fence": False,
        "messages": [
            {"role": "user", "content": "{prompt} {first} or {second}? {how_to_answer}"}
        ],
    }
    spread = {"reward": f"{tmp_path / 'their_rewards.py'}:spread"}
    rewards = [{"reward": "agrees:mine", "args": judge}, spread]
    folder = run_folder(tmp_path, model, dataset=str(tmp_path / "pairs.jsonl"), rewards=rewards)
    started = json.loads((folder.root / "engines.json").read_text())
    write_json_atomic(folder.root / "engines.json", {**started, "max_model_len": 256})
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    written = read_metrics(folder.metrics)
    assert len(written) == 2
    for row in written:
        assert (
            row["rewards/mine/mean"] == 0 and row["grad_norm"] > 0 and row["ycore/masked"] == 0
        )
        assert row["ycore/judge/parse_failures"] >= 8 and row["ycore/judge/calls"] == 0
    prompts = [sample["prompt"] for sample in json.loads(folder.samples.read_text())["before"]]
    assert all(
        " or " in str(prompt) and "the first answer is better" in str(prompt)
        for prompt in prompts
    )


def check_model(folder: RunFolder, model: Path, *, lora: bool) -> None:
    """It loads, differs from where it began, and for LoRA the merged model is base plus adapter."""
    AutoTokenizer.from_pretrained(folder.model)
    first = weights(model)
    ids = torch.tensor([[9, 8, 7, 6]])
    base = AutoModelForCausalLM.from_pretrained(model)
    if not lora:
        trained = AutoModelForCausalLM.from_pretrained(folder.model)
        assert not torch.allclose(trained(ids).logits, base(ids).logits, atol=1e-3)
        assert weights(folder.model).keys() == first.keys()
        return
    adapted = PeftModel.from_pretrained(base, folder.model)
    with torch.no_grad():
        with adapted.disable_adapter():
            before = adapted(ids).logits
        assert not torch.allclose(adapted(ids).logits, before, atol=1e-4)
        merged = AutoModelForCausalLM.from_pretrained(folder.model / "merged")
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.verify
def test_an_interrupted_run_leaves_a_checkpoint_and_goes_on_from_it(
    tmp_path: Path, model: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    folder = run_folder(tmp_path, model, steps=300, checkpoint_every=300)
    process = start(folder)
    ended.append(process)
    deadline = time.monotonic() + 600
    while len(read_metrics(folder.metrics)) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    done = len(read_metrics(folder.metrics))
    assert [path.name for path in folder.checkpoints.glob("checkpoint-*")] == [
        f"checkpoint-{done}"
    ]
    _, living = psutil.wait_procs(
        children, timeout=5
    )  # what the kernel ends with a worker, it ends a moment later
    assert children and not any(is_alive(child) for child in living)

    shorter = json.loads(folder.config.read_text())
    shorter["config"]["steps"] = done + 1
    write_json_atomic(folder.config, shorter)
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    assert [row["step"] for row in read_metrics(folder.metrics)] == list(range(1, done + 2))


def test_a_users_mistake_is_one_line_and_exit_2(
    tmp_path: Path, model: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    folder = run_folder(tmp_path, model, trl={"max_grad_norm": 1.0}, max_tokens=63)
    code, stderr = finish(folder, ended)
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in stderr
    assert len(errors) == 1 and "tokens, between 1 and 1 fit" in errors[0]


ECHO = """
class Echo:
    turn_reward = None

    def reset(self, **row):
        self.heard = []
        return " Go on."

    def step(self, text):
        self.heard.append(text)
        self.turn_reward = len(text) / 12
        return f"{len(self.heard)} so far" if len(self.heard) < 3 else None

    def get_reward(self):
        return float(sum(map(len, self.heard)) % 5)

class Less(Echo):
    def get_reward(self):
        return super().get_reward() - 10
"""


@pytest.mark.verify
def test_a_run_draws_two_datasets_by_share_and_tells_their_rewards_apart(
    tmp_path: Path, model: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    (tmp_path / "talk.jsonl").write_text('{"question": "Hello."}\n')
    reward = f"{tmp_path / 'their_rewards.py'}:spread"
    settings = {
        "mixture": [
            {"dataset": str(tmp_path / "rows.jsonl"), "share": 3, "rewards": [reward]},
            {"dataset": str(tmp_path / "talk.jsonl"), "share": 1, "rewards": ["length"]},
        ],
        "eval_every": 2,
        "rewards": [RewardConfig(reward=reward), RewardConfig(reward="length")],
        "sampling": {"dynamic": False},
        "prompts_per_step": 16,
        "keep_journal": True,
    }
    shutil.copy(tmp_path / "talk.jsonl", tmp_path / "held.jsonl")
    for part, name in zip(settings["mixture"], ("rows.jsonl", "held.jsonl"), strict=True):
        part["eval_dataset"] = str(tmp_path / name)
    folder = run_folder(tmp_path, model, **settings)
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    before, *rows = read_metrics(folder.metrics)
    names = [f"ycore/reward/{name}" for name in ("rows.jsonl", "talk.jsonl")]
    assert len(rows) == 2 and all(set(names) <= row.keys() for row in rows)
    # Each dataset's held-out rows are scored by its own reward, and have figures under its name: of 8 rows and of 1.
    for row in (before, rows[-1]):
        of_all, of_sums, of_talk = (
            row[f"ycore/eval/{name}reward"] for name in ("", "rows.jsonl/", "held.jsonl/")
        )
        assert of_all == pytest.approx((8 * of_sums + of_talk) / 9)
        assert of_talk == row["ycore/eval/held.jsonl/rewards/length"]
        assert "ycore/eval/held.jsonl/rewards/spread" not in row
    drawn = []
    for number in (0, 1):
        round_ = Journal(folder.journal, rank=0).read(number)
        assert round_ is not None
        for group in round_.groups:
            is_talk = group.draw.prompt.dataset == "talk.jsonl"
            drawn.append(is_talk)
            for spread, length in group.scores_GR:
                assert (spread.value is None, length.value is None) == (is_talk, not is_talk)
                assert spread.problem is None and length.problem is None
    assert (len(drawn), sum(drawn)) == (32, 10)  # of seed 0; 25 of every hundred


@pytest.mark.verify
def test_datasets_of_a_run_are_played_in_the_environment_that_each_names(
    tmp_path: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    model = write_brief_model(tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "less.jsonl").write_text('{"prompt": "Talk.", "environment": "a column"}\n')
    (tmp_path / "talk.jsonl").write_text('{"prompt": "Talk."}\n')
    play = {"rewards": ["environment"], "share": 1}
    spread = f"{tmp_path / 'their_rewards.py'}:spread"
    settings = {
        "env": [f"{tmp_path / 'echo.py'}:Echo", f"less={tmp_path / 'echo.py'}:Less"],
        "mixture": [
            {"dataset": str(tmp_path / "less.jsonl"), "environment": "less", **play},
            {"dataset": str(tmp_path / "talk.jsonl"), "environment": "Echo", **play},
            {
                "dataset": str(tmp_path / "rows.jsonl"),
                "environment": "none",
                "rewards": [spread],
            },
        ],
        "rewards": [RewardConfig(reward="environment"), RewardConfig(reward=spread)],
        "sampling": {"dynamic": False},
        "prompts_per_step": 8,
        "max_turns": 4,
        "max_tokens": 60,
        "keep_journal": True,
        "turns": {"max_tokens": 12},
        "steps": 1,
    }
    folder = run_folder(tmp_path, model, **settings)
    write_json_atomic(
        folder.engines, {**json.loads(folder.engines.read_text()), "max_model_len": 256}
    )
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    round_ = Journal(folder.journal, rank=0).read(0)
    assert round_ is not None
    names = set()
    for group in round_.groups:
        names.add(name := str(group.draw.prompt.dataset))
        is_played = name != "rows.jsonl"
        says = group.draw.prompt.content[-1]["content"]
        assert says.endswith(" Go on.") == is_played
        for completion, scores in zip(group.completions, group.scores_GR, strict=True):
            paid, spread_score = (score.value for score in scores)
            assert (paid is None, spread_score is None) == (not is_played, is_played)
            assert all(score.problem is None for score in scores)
            assert is_played or len(completion.turns) == 1
            if paid is not None:
                assert (paid < 0) == (name == "less.jsonl")
    assert names == {"less.jsonl", "talk.jsonl", "rows.jsonl"}


@pytest.mark.verify
def test_a_policy_learns_in_two_environments_of_several_turns_without_a_dataset(
    tmp_path: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    model = write_brief_model(tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    env = f"{tmp_path / 'echo.py'}:Echo"
    settings = {
        "env": [env, f"less={tmp_path / 'echo.py'}:Less"],
        "dataset": "",
        "advantage": "turn",
        "max_turns": 4,
        "max_tokens": 120,
        "keep_journal": True,
        "turns": {"max_tokens": 12},
    }
    folder = run_folder(
        tmp_path, model, **settings, rewards=[RewardConfig(reward="environment")]
    )
    write_json_atomic(
        folder.engines, {**json.loads(folder.engines.read_text()), "max_model_len": 256}
    )
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    round_ = Journal(folder.journal, rank=0).read(0)
    assert round_ is not None
    written = [completion for group in round_.groups for completion in group.completions]
    assert all(
        group.draw.prompt.content[-1]["content"].endswith(" Go on.") for group in round_.groups
    )
    assert (
        max(len(completion.turns) for completion in written) == 5
    )  # three of the policy's, and two answers
    for completion in written:
        answers = [
            message["content"]
            for turn in completion.turns
            if not turn.by_policy
            for message in turn.messages
        ]
        assert answers == [f"{number} so far" for number in range(1, len(answers) + 1)]
        texts = [turn for turn in completion.turns if turn.by_policy]
        assert [turn.reward for turn in texts[:-1]] == [
            len(turn.messages[0]["content"]) / 12 for turn in texts[:-1]
        ]
        assert 0 < sum(completion.mask) <= 4 * 12 and completion.earned is not None
    rows = read_metrics(folder.metrics)
    assert len(rows) == 2 and all(row["ycore/turns/mean"] > 1.2 for row in rows)
    assert all(0 < row["ycore/turns/reward"] <= 1 for row in rows)
    assert any("ycore/reward/Echo" in row for row in rows) and any(
        "ycore/reward/less" in row for row in rows
    )
    assert all(
        row.get("ycore/reward/Echo", 0) >= 0 and row.get("ycore/reward/less", -6) <= -6
        for row in rows
    )
    assert all(
        row["ycore/turns/masked_tokens"] > 5 and row["ycore/masked"] == 0 for row in rows
    )
    samples = json.loads(folder.samples.read_text())
    assert "\nuser: 1 so far\n" in "".join(sample["completion"] for sample in samples["after"])


TALKER = """
import json, os, sys, urllib.error, urllib.request

def ask(messages):
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as reply:
        return json.load(reply)["choices"][0]["message"]

seed = int(os.environ["YCORE_SEED"])
if seed % 4 == 2:  # some of this run's seeds in each of its two steps
    sys.exit(3)
messages = [{"role": "user", "content": "go" * (1 + seed % 3)}]
messages.append(ask(messages))
open(os.environ["YCORE_REWARD_FILE"], "w").write(str(len(messages[-1]["content"]) % 5))
messages += [{"role": "user", "content": "more"}]
try:
    ask(messages)
    ask([{"role": "user", "content": "anew"}])
except urllib.error.HTTPError:
    pass
"""


@pytest.mark.verify
def test_a_policy_learns_with_an_agent_that_writes_its_own_prompts(
    tmp_path: Path, ended: list["subprocess.Popen[str]"]
) -> None:
    model = write_brief_model(tmp_path)
    (tmp_path / "talker.py").write_text(TALKER)
    agent = f"python {tmp_path / 'talker.py'}"
    settings = {
        "agent": agent,
        "max_tokens": 120,
        "keep_journal": True,
        "turns": {"max_tokens": 12},
    }
    folder = run_folder(
        tmp_path, model, **settings, rewards=[RewardConfig(reward="environment")]
    )
    write_json_atomic(
        folder.engines, {**json.loads(folder.engines.read_text()), "max_model_len": 256}
    )
    code, stderr = finish(folder, ended)
    assert code == 0, stderr
    round_ = Journal(folder.journal, rank=0).read(0)
    assert round_ is not None
    written = [completion for group in round_.groups for completion in group.completions]
    prompts = {completion.prompt_ids for completion in written}
    assert len(prompts - {None}) > 1, "each agent writes a prompt of its own"
    assert all(
        completion.finish_reason == "failed"
        for completion in written
        if completion.prompt_ids is None
    )
    sizes = [len(completion.sequences(())) for completion in written]
    assert any(len(completion.turns) == 5 for completion in written) and set(sizes) == {1, 2}
    rows = read_metrics(folder.metrics)
    assert len(rows) == 2 and all(
        row["ycore/logprob_gap"] < 1e-3 for row in rows if "ycore/logprob_gap" in row
    )
    assert all(1 < row["ycore/turns/sequences"] <= 2 for row in rows), (
        "a step may be without a failed agent"
    )
    assert rows[0]["ycore/turns/sequences"] < 2 and 0 < rows[0]["ycore/turns/ended_failed"] < 64


@pytest.mark.parametrize("divided", [True, False])
def test_a_trainer_keeps_to_its_share_of_the_cores(tmp_path: Path, divided: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    write_json_atomic(
        RunFolder(tmp_path).engines, {"cores": [cores[1:], cores[:1]] if divided else None}
    )
    line = (
        "import os, sys; from pathlib import Path; from ycore.run.files import RunFolder; "
        "from ycore.trainer.__main__ import keep_to_cores; "
        "keep_to_cores(RunFolder(Path(sys.argv[1])), 1); print(sorted(os.sched_getaffinity(0)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", line, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == (cores[:1] if divided else cores)
