"""VllmEngine against sockets that misbehave, and against one real vLLM server on CPU.

The servers of the first half are real ones on real sockets that answer what the test says.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ycore.config.run import RewardConfig, RewardSettings
from ycore.controller.draws import DrawSource, completion_seed
from ycore.controller.peers import Alone
from ycore.controller.round import Rules
from ycore.controller.source import Rounds
from ycore.errors import EngineError, SyncError
from ycore.launch.engines import is_vllm_installed
from ycore.launch.health import is_healthy
from ycore.launch.processes import ManagedProcess
from ycore.launch.reaper import RunWatch, remove_leftovers
from ycore.models.tiny import write_tiny_model
from ycore.rewards.pool import RewardPool
from ycore.roles.engine import Sampling
from ycore.roles.rollout import RolloutEngine, engine_command, engine_environment
from ycore.roles.vllm_engine import VllmEngine
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.private import make_private, temporary_folder
from ycore.types import Completion, Prompt

SAMPLING = Sampling(max_tokens=12, stop_token_ids=(2,))
Answer = Callable[[str], Awaitable[tuple[int, bytes]]]


@pytest.fixture
def socket() -> Iterator[Path]:
    """In a folder of its own with a short name: a socket's path holds about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="yc-") as folder:
        yield Path(folder) / "e.sock"


@asynccontextmanager
async def serving(socket: Path, answer: Answer) -> AsyncIterator[None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                await reader.readexactly(length)
                status, body = await answer(line.split()[1].decode())
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(handle, socket)
    try:
        yield
    finally:
        server.close()


def engine_at(socket: Path, *, timeout_s: float = 5.0, sampling: Sampling = SAMPLING) -> VllmEngine:
    return VllmEngine("rollout-7", socket, sampling, request_timeout_s=timeout_s)


async def says_version(told: str, path: str) -> tuple[int, bytes]:
    return 200, json.dumps({"weight_version": told}).encode() if path == "/weight_info" else b""


@pytest.mark.parametrize("told", ["2", "4", "", "default"])
def test_an_engine_that_names_another_version_is_a_sync_error(socket: Path, told: str) -> None:
    async def work() -> None:
        async with serving(socket, lambda path: says_version(told, path)):
            engine = engine_at(socket)
            with pytest.raises(SyncError, match=f"rollout-7: holds policy version {told}, not 3"):
                await engine.load_weights(Path("/nowhere"), 3)
            assert engine.version == 0
            await engine.close()

    asyncio.run(work())


def test_the_version_read_back_is_taken(socket: Path) -> None:
    async def work() -> None:
        async with serving(socket, lambda path: says_version("3", path)):
            engine = engine_at(socket)
            await engine.load_weights(Path("/nowhere"), 3)
            assert engine.version == 3
            await engine.close()

    asyncio.run(work())


async def refuses(path: str) -> tuple[int, bytes]:
    return 500, b'{"error": "no such token"}'


async def babbles(path: str) -> tuple[int, bytes]:
    return 200, b"<html>"


async def hangs(path: str) -> tuple[int, bytes]:
    await asyncio.sleep(60)
    return 200, b""


async def hangs_up(path: str) -> tuple[int, bytes]:
    raise ConnectionResetError


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuses, "rollout-7: /v1/completions answered 500: .*no such token"),
        (babbles, "rollout-7: /v1/completions answered '<html>', which is not JSON"),
        (hangs, "rollout-7: no answer to /v1/completions within 1 s"),
        (hangs_up, "rollout-7: /v1/completions failed"),
        (None, "rollout-7: /v1/completions failed"),
    ],
    ids=["refuses", "babbles", "hangs", "hangs-up", "dead"],
)
def test_whatever_goes_wrong_is_an_engine_error_in_time(socket: Path, answer: Answer | None, said: str) -> None:
    async def ask() -> None:
        engine = engine_at(socket, timeout_s=1.0)
        started = time.monotonic()
        with pytest.raises(EngineError, match=said):
            await engine.complete([9, 8], 1)
        assert time.monotonic() - started < 5
        await engine.close()

    async def work() -> None:
        if answer is None:
            return await ask()
        async with serving(socket, answer):
            await ask()

    asyncio.run(work())


def test_waiting_ends_when_the_engine_comes_or_the_time_is_over(socket: Path) -> None:
    async def work() -> None:
        engine = engine_at(socket)
        with pytest.raises(EngineError, match=r"rollout-7: not ready after 1 s; see logs/rollout-7\.log"):
            await engine.wait_ready(timeout_s=1)
        waiting = asyncio.create_task(engine.wait_ready(timeout_s=20))
        await asyncio.sleep(0.3)
        async with serving(socket, lambda path: says_version("0", path)):
            await waiting
        await engine.close()

    asyncio.run(work())


# -- one real engine ---------------------------------------------------------------------------------------------------

real = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]
PROMPTS = [[9, 8, 7], [30, 31, 32, 33, 34, 35, 36], [50], [60, 61]]
REWARD = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a vLLM server with the tiny model in float32; killed in any case."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    engine = RolloutEngine(
        name="rollout-0",
        model=model,
        socket=folder.socket("rollout-0"),
        temporary=temporary_folder(folder),
        run_id=folder.run_id,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        seed=0,
        cores=(min(os.sched_getaffinity(0)),),
    )
    for path in (folder.sockets, engine.temporary):
        make_private(path)
    watch = RunWatch(folder.run_id)
    process = ManagedProcess.start(
        engine.name,
        engine_command(engine),
        environment=engine_environment(engine),
        run_id=folder.run_id,
        log=folder.root / "log",
        cores=engine.cores,
    )
    try:
        deadline = time.monotonic() + 180
        while not is_healthy(engine.socket):
            assert process.exit_code is None, process.last_line()
            assert time.monotonic() < deadline, process.last_line()
            watch.look()
            time.sleep(0.2)
        yield engine.socket
    finally:
        watch.look()
        watch.kill(grace_s=0)
        process.wait(timeout_s=20)
        watch.remove_segments()
        remove_leftovers(folder)
    assert RunWatch(folder.run_id).look() == []


class RealEngine:
    """Tests share one real engine; each begins with the checkpoint's own weights."""

    pytestmark = real

    def ask(self, server: Path, model: Path, sampling: Sampling, times: int = 1) -> list[list[Completion]]:
        async def work() -> list[list[Completion]]:
            engine = engine_at(server, timeout_s=60, sampling=sampling)
            await engine.load_weights(model, 0)
            answers = []
            for _ in range(times):
                asked = [
                    engine.complete(prompt, completion_seed(0, position, index))
                    for position, prompt in enumerate(PROMPTS)
                    for index in range(8)
                ]
                answers.append(list(await asyncio.gather(*asked)))
            await engine.close()
            return answers

        return asyncio.run(work())


class TestCompletions(RealEngine):
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_logprobs_are_the_trainers_own(self, server: Path, model: Path, temperature: float) -> None:
        sampling = Sampling(max_tokens=12, temperature=temperature, stop_token_ids=(2,))
        (completions,) = self.ask(server, model, sampling)
        prompts = [prompt for prompt in PROMPTS for _ in range(8)]
        gaps = [
            abs(ours - theirs)
            for prompt, completion in zip(prompts, completions, strict=True)
            for ours, theirs in zip(trainer_logprobs(model, prompt, completion, temperature), logprobs(completion))
        ]
        print(f"mean gap {sum(gaps) / len(gaps):.2g}, largest {max(gaps):.2g}, over {len(gaps)} tokens")
        assert sum(gaps) / len(gaps) < 0.01

    def test_the_same_seeds_give_the_same_tokens_and_others_do_not(self, server: Path, model: Path) -> None:
        first, second = self.ask(server, model, SAMPLING, times=2)
        assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]
        assert len({completion.token_ids for completion in first}) > 28

    def test_a_completion_ends_with_its_end_token_or_at_its_limit(self, server: Path, model: Path) -> None:
        ends = (2, *range(6, 26))  # vLLM ends at the model's own end token in any case
        (completions,) = self.ask(server, model, Sampling(max_tokens=12, stop_token_ids=ends))
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}
        for completion in completions:
            assert not set(completion.token_ids[:-1]) & set(ends)
            assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
            assert len(completion.token_ids) <= 12 and len(logprobs(completion)) == len(completion.token_ids)


class TestTraining(RealEngine):
    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_engine_and_trainer_agree_on_every_step(
        self, server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
    ) -> None:
        gaps, versions = self.train(server, model, tmp_path, monkeypatch, lora=lora, syncs=True)
        print(f"gaps by step, synced: {gaps}")
        assert len(gaps) == 4 and max(gaps) < 0.01
        assert versions == [0, 1, 2, 3]

    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_without_the_sync_they_drift_apart(
        self, server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
    ) -> None:
        gaps, versions = self.train(server, model, tmp_path, monkeypatch, lora=lora, syncs=False)
        print(f"gaps by step, frozen: {gaps}")
        assert gaps[0] < 0.01 and gaps[-1] > 0.05
        assert versions == [0, 0, 0, 0]

    def train(
        self, server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lora: bool, syncs: bool
    ) -> tuple[list[float], list[int]]:
        """Four steps at a large learning rate; the gap of each, and the version that wrote each round."""
        import torch

        from ycore.algorithms.weights import write_weights

        self.ask(server, model, SAMPLING)  # the checkpoint's weights, as version 0
        (tmp_path / "their_rewards.py").write_text(REWARD)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        trainer = make_trainer(model, tmp_path, lora=lora)
        weights = tmp_path / "weights"

        def share(version: int) -> Path:
            write_weights(trainer.bare_model, weights, dtype=torch.float32)
            return weights

        rounds = Rounds(
            engines=[engine_at(server, timeout_s=60)],
            rewards=RewardPool(
                [RewardConfig(reward="their_rewards.py:spread")],
                settings=RewardSettings(workers=1),
                log=tmp_path / "rewards.log",
                run_id="test-vllm",
            ),
            draws=DrawSource(
                [Prompt(row=row, content=str(row)) for row in range(len(PROMPTS))],
                seed=0,
                encode=lambda prompt: tuple(PROMPTS[prompt.row]),
                max_prompt_tokens=32,
            ),
            rules=Rules(group_size=4, seed=0, reward_weights=(1.0,)),
            peers=Alone(),
            share_weights=share if syncs else None,
        )
        rounds.record = trainer.record
        trainer.rounds = rounds
        try:
            rounds.start(timeout_s=60)
            trainer.train()
        finally:
            rounds.close()
        rows = [row for row in trainer.state.log_history if "ycore/logprob_gap" in row]
        return [row["ycore/logprob_gap"] for row in rows], trainer.versions


def make_trainer(model: Path, output: Path, *, lora: bool) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from ycore.algorithms.trl_seam import SeamGRPOTrainer, placeholder_rewards

    class Watched(SeamGRPOTrainer):
        """Remembers which version of the policy wrote each round."""

        versions: Sequence[int] = ()

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            engine = self.rounds._engines[0]  # type: ignore[attr-defined]
            self.versions = [*self.versions, engine.version]
            return batch

    return Watched(
        model=str(model),
        reward_funcs=placeholder_rewards(["spread"]),
        args=GRPOConfig(
            output_dir=str(output / "out"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=4,
            learning_rate=3e-2 if lora else 1e-2,
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=12,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * 16}),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )


def logprobs(completion: Completion) -> tuple[float, ...]:
    assert completion.logprobs is not None
    return completion.logprobs


def trainer_logprobs(model: Path, prompt: list[int], completion: Completion, temperature: float) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tokens = list(completion.token_ids)
    with torch.no_grad():
        logits = loaded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
    values: list[float] = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return values
