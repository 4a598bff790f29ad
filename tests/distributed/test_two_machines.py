"""Two launchers as two machines on loopback, each with the same command: one run, one model, one end.

Both live on this machine; what is not shown is a network between them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

pytestmark = pytest.mark.slow

REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
COMMON = (
    "--model model --dataset rows.jsonl --reward their_rewards.py:spread --max-tokens 8 --engine transformers "
    "--prompts-per-step 4 --group-size 4 --set dtype=float32"
)
WITHIN_S = 400


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "their_rewards.py").write_text(REWARD)
    yield tmp_path


def run(
    place: Path,
    outputs: list[str],
    prompts: list[str],
    *,
    steps: int = 3,
    interrupt_after: int | None = None,
) -> list[tuple[int, str]]:
    """Exit status and standard error of each machine's command; the second may get a Ctrl-C after so many steps."""
    (place / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    nodes = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for number, output in enumerate(outputs):
        command = [
            sys.executable,
            "-c",
            "from ycore_cli.main import main; main()",
            "grpo",
            *COMMON.split(),
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "NNODES": "2",
            "NODE_RANK": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        node = subprocess.Popen(
            [*command, "--output", output, "--steps", str(steps)],
            cwd=place,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        nodes.append(node)
    try:
        if interrupt_after is not None:
            wait_for_steps(place / outputs[0] / "metrics.jsonl", interrupt_after)
            nodes[1].send_signal(signal.SIGINT)
        said = [node.communicate(timeout=WITHIN_S)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


def wait_for_steps(metrics: Path, number: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while len(read_metrics(metrics)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.verify
def test_an_interrupt_of_one_machine_stops_both(place: Path) -> None:
    prompts = [f"{n} + 1 =" for n in range(16)]
    ends = run(place, ["run", "run"], prompts, steps=2000, interrupt_after=2)
    assert [code for code, _ in ends] == [130, 130], ends
    step = json.loads((place / "run" / "summary.json").read_text())["steps"]
    saved = place / "run" / "checkpoints" / f"checkpoint-{step}"
    assert {path.name for path in saved.glob("controller-*.json")} == {
        "controller-0.json",
        "controller-1.json",
    }


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(["run", "run"], id="shared folder"),
        pytest.param(["one", "two"], id="own folders", marks=pytest.mark.verify),
    ],
)
def test_two_machines_make_one_run(place: Path, outputs: list[str]) -> None:
    ends = run(place, outputs, [f"{n} + 1 =" for n in range(16)])
    assert [code for code, _ in ends] == [0, 0], ends
    first, second = place / outputs[0], place / outputs[1] / "node-1"
    assert [row["step"] for row in read_metrics(first / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((first / "summary.json").read_text())["steps"] == 3
    assert json.loads((second / "summary.json").read_text())["status"] == "finished"
    assert (first / "model" / "adapter_model.safetensors").is_file()
    assert not (second / "model").exists() and not read_metrics(second / "metrics.jsonl")
    for folder, log in ((first, "trainer-0.log"), (second, "trainer-1.log")):
        assert (folder / "logs" / log).is_file()
        assert not RunFolder(folder).sockets.exists()


@pytest.mark.verify
def test_a_mistake_seen_by_one_machine_ends_both(place: Path) -> None:
    ends = run(place, ["run", "run"], ["1 + 1 ="] * 7 + ["7" * 600])
    codes = sorted(code for code, _ in ends)
    assert codes == [1, 2], ends
    for code, said in ends:
        error = next(line for line in said.splitlines() if line.startswith("error: "))
        assert "row 7: the prompt has 6" in error
        assert code == 2 or "machine " in error
