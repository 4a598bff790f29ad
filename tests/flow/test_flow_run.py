"""A whole run of a tiny flow model in this process: it learns, is killed anywhere, and goes on to the bit."""

import base64
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.flow.conftest import save_tiny_model
from ycore.config.resolve import resolve_any
from ycore.errors import Interrupted
from ycore.flow.flow_run import FlowRun
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.learner import Learner
from ycore.flow.picture_rounds import Picture
from ycore.run.claim import claim
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.metrics import read_metrics
from ycore.view.report import read_run, render_page

REWARD = """
import numpy

def bright(images, label):
    values = [numpy.asarray(image.convert("L"), dtype=float).mean() / 255 for image in images]
    return [value if asked else 1 - value for value, asked in zip(values, label)]

def flat(images):
    return [0.5 + 1e-5 * place for place, _ in enumerate(images)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("flow-run") / "tiny")


def start(root: Path, model: Path, **keys: Any) -> FlowRun:
    """A run as the launcher would have left it, new or to go on."""
    folder = RunFolder(root)
    reward = root.parent / "reward.py"
    reward.write_text(REWARD)
    settings: dict[str, Any] = {
        "model": str(model), "dataset": "classes", "output": str(root), "rewards": [f"{reward}:bright"], "steps": 4,
        "prompts_per_step": 2, "group_size": 4, "num_samples": 2, "eval_every": 2, "learning_rate": 1e-2,
        "checkpoint_every": 2, "sandbox": {"level": "none"}, "reward_workers": {"workers": 1},
    }  # fmt: skip
    config = resolve_any(recipe=settings | keys, options={"algorithm": "flow"})
    assert isinstance(config, FlowConfig)
    claim(folder, config, resume=folder.config.is_file()).release()
    write_json_atomic(folder.engines, {"kind": "none", "engines": [], "model": str(model)})
    return FlowRun(root)


def finish(run: FlowRun) -> dict[str, torch.Tensor]:
    try:
        run.train()
        run.save()
        return {
            name: weight.clone()
            for name, weight in (run.learner.policy.copy() | run.learner.old).items()
        }
    finally:
        run.close()


FLOWS = {
    "nft": {
        "method": "nft",
        "sampler": "heun",
        "steps": 3,
        "kl": 0.1,
        "eval_steps": 3,
        "batch": 4,
        "updates": 2,
    },
    "grpo": {"method": "grpo", "window": 2, "steps": 4, "kl": 0.1, "eval_steps": 3, "batch": 4},
}


@pytest.mark.parametrize("method", ["nft", "grpo"])
def test_a_run_that_was_killed_goes_on_to_the_bit(
    method: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = FLOWS[method]
    whole = finish(start(tmp_path / "whole", model, flow=flow))
    run = start(tmp_path / "killed", model, flow=flow)
    learn = Learner.learn

    def killed(self: Learner, groups: Any, *, step: int) -> dict[str, float]:
        if step == 3:
            raise KeyboardInterrupt  # the round is in the journal, the step is not taken
        return learn(self, groups, step=step)

    monkeypatch.setattr(Learner, "learn", killed)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.close()
    monkeypatch.undo()
    again = start(tmp_path / "killed", model, flow=flow)
    resumed = finish(again)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    rows = {
        name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")
    }
    kept = [
        [
            {key: row.get(key) for key in ("step", "loss", "reward", "ycore/eval/reward")}
            for row in rows[name]
        ]
        for name in rows
    ]
    assert kept[0] == kept[1]
    assert [row["step"] for row in rows["killed"]] == [0, 1, 2, 3, 4]
    assert (
        rows["killed"][-1]["ycore/replayed"] == 1.0
        and "ycore/replayed" not in rows["whole"][-1]
    )
    journal = (tmp_path / "whole" / "journal" / "round-000003-rank-0.json").read_text()
    assert len(journal) < 20_000 and "trajectories" not in journal
    left = sum(
        1 for path in (tmp_path / "whole" / "images").iterdir() if path.name not in journal
    )
    assert left < 60, "pictures of rounds that are over are gone"


def test_the_first_pass_of_grpo_has_ratio_one_and_the_reward_is_measured(
    model: Path, tmp_path: Path
) -> None:
    finish(start(tmp_path / "run", model, flow=FLOWS["grpo"], steps=1))
    before, row = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["ycore/flow/ratio_off"] < 1e-5 and row["ycore/flow/ratio"] == pytest.approx(
        1, abs=1e-5
    )
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert {
        "loss",
        "grad_norm",
        "reward",
        "ycore/time/step",
        "ycore/flow/pictures_per_s",
    } <= row.keys()
    assert before["step"] == 0 and before["ycore/eval/diversity"] > 0
    ends = json.loads((tmp_path / "run" / "held_out.json").read_text())["held_out"]
    assert ends["after"]["reward"] == row["ycore/eval/reward"]
    assert (tmp_path / "run" / "pictures.png").is_file()
    page = render_page([read_run(tmp_path / "run")])
    assert "Drawn before and after" in page and "trajectories" not in page
    assert (tmp_path / "run" / "model" / "scheduler" / "scheduler_config.json").is_file()


def test_rewards_that_differ_by_dust_teach_nothing(model: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", model, rewards=[f"{tmp_path}/reward.py:flat"], flow=FLOWS["nft"], steps=1,
                sampling={"max_tries": 1})  # fmt: skip
    before = run.learner.policy.copy()
    after = finish(run)
    assert all(torch.equal(after[name], before[name]) for name in before)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (
        row["ycore/skipped"] == 1.0
        and row["frac_reward_zero_std"] == 1.0
        and row["reward_std"] > 0
    )


def test_a_run_that_is_stopped_keeps_its_last_step(model: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", model, flow=FLOWS["nft"])
    take_step = run._take_step

    def stopping() -> None:
        take_step()
        run.stop.set()

    run._take_step = stopping  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        run.train()
    run.save_checkpoint()
    run.close()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-1" / "manifest.json").is_file()


def test_a_picture_in_the_journal_is_named_by_its_sha256(model: Path, tmp_path: Path) -> None:
    finish(start(tmp_path / "run", model, flow=FLOWS["nft"], steps=1, keep_journal=True))
    _, body = (
        (tmp_path / "run" / "journal" / "round-000000-rank-0.json").read_text().splitlines()
    )
    completions = [
        completion
        for group in json.loads(body)["groups"]
        for completion in group["completions"]
    ]
    pictures = [Picture.of(completion["text"]) for completion in completions]
    assert len({picture.image.sha256 for picture in pictures}) > 1
    assert all(
        (tmp_path / "run" / "images" / picture.image.sha256).is_file() for picture in pictures
    )


@pytest.mark.parametrize("method", ["nft", "grpo"])
def test_a_run_learns(method: str, model: Path, tmp_path: Path) -> None:
    finish(start(tmp_path / "run", model, flow=FLOWS[method] | {"kl": 0.0, "updates": 3, "batch": 32}, steps=6,
                 prompts_per_step=3, group_size=8, num_samples=8, eval_every=6))  # fmt: skip
    measured = [
        row
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "ycore/eval/reward" in row
    ]
    assert measured[-1]["ycore/eval/reward/low"] > measured[0]["ycore/eval/reward"]


@pytest.fixture
def judge_that_sees() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server that answers with the brightness of the picture it is shown; what it was asked."""
    requests: list[dict[str, Any]] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            picture, text = body["messages"][-1]["content"]
            data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
            light = Image.open(io.BytesIO(data)).convert("L").resize((1, 1)).getpixel((0, 0))
            tag = re.findall(r"<(score-[0-9a-f]{6})>", text["text"])[-1]
            message = {"role": "assistant", "content": f"<{tag}>{light / 25.5:.1f}</{tag}>"}
            answer = {
                "choices": [{"message": message, "finish_reason": "stop"}],
                "usage": {"completion_tokens": 5},
            }
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
        server.shutdown()


def test_a_judge_at_an_address_is_shown_each_picture(
    judge_that_sees: tuple[str, list[dict[str, Any]]], model: Path, tmp_path: Path
) -> None:
    address, requests = judge_that_sees
    judge = {
        "base_url": address, "model": "eyes", "mode": "pointwise", "rubric": "How bright is it?",
        "verdict": {"kind": "score", "min": 0, "max": 10}, "retries": 0,
    }  # fmt: skip
    reward = {"reward": "judge:bright", "args": judge}
    run = start(tmp_path / "run", model, flow=FLOWS["nft"], rewards=[reward], steps=2)
    finish(run)
    rows = [
        row
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "ycore/time/step" in row
    ]
    assert len(rows) == 2 and all(
        row["ycore/judge/calls"] >= 8 and row["ycore/judge/parse_failures"] == 0 for row in rows
    )
    assert 0 < rows[0]["reward"] < 1 and rows[0]["ycore/skipped"] == 0
    pictures = {body["messages"][-1]["content"][0]["image_url"]["url"] for body in requests}
    assert len(pictures) > 8, "each question shows its own picture"
    codes = {
        re.findall(r"score-[0-9a-f]{6}", body["messages"][-1]["content"][1]["text"])[-1]
        for body in requests
    }
    assert len(codes) >= len(pictures), "and no verdict can be copied from another"
    assert "[picture 1]" in requests[0]["messages"][-1]["content"][1]["text"]
