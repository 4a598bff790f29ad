"""One real vLLM server on CPU, in float32: its log-probabilities are the trainer's, before and after updates."""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.rollout.talks import rules_alone
from tests.scoring.pools import pool_in
from tests.tiny_model import write_tiny_model
from ycore.config.schema import RewardConfig, RewardSettings, RunConfig
from ycore.engine import SamplingParams, WeightSource, vllm_engine
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.shared_bucket import Bucket, Entry
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import tensor_sums, write_manifest
from ycore.errors import SyncError
from ycore.rollout.agents import AgentPool, AgentWriter
from ycore.rollout.dialogue import Dialogue
from ycore.rollout.tool_pool import ToolPool, ToolSet
from ycore.rollout.turns import (
    GroupStart,
    MultiTurnWriter,
    TurnLimits,
    completion_seed,
)
from ycore.round.ahead import ControllerAhead
from ycore.round.in_flight import InFlight
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.files import RunFolder
from ycore.types import Completion, Draw, Group, Prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(2,))
PROMPTS = [[9, 8, 7], [30, 31, 32, 33, 34, 35, 36], [50], [60, 61]]
REWARD = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model, with the sums of its tensors beside it, as if a trainer had written it as version 0."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    write_manifest(
        folder, 0, {name: tensor_sums(tensor) for name, tensor in stored_in(folder).items()}
    )
    return folder


def stored_in(folder: Path) -> dict[str, Any]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def server(
    model: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[Path]:
    """Start a vLLM server with the tiny model in float32, and yield its socket; it is killed in any case."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    engine = cpu_engine(folder, model, max_model_len=256)
    with serve(folder, [engine]):
        yield engine.socket


@pytest.fixture(scope="module")
def adapter_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[Path]:
    """Serve an engine that takes the policy's adapters alone, and yield its socket."""
    folder = RunFolder(tmp_path_factory.mktemp("adapters"))
    engine = cpu_engine(folder, model, max_model_len=64, lora_rank=6)
    with serve(folder, [engine]):
        yield engine.socket


def engine_at(socket: Path, sampling: SamplingParams = SAMPLING) -> VllmEngine:
    return VllmEngine("rollout-0", socket, sampling, request_timeout_s=60)


def ask(
    server: Path, model: Path, sampling: SamplingParams, times: int = 1
) -> list[list[Completion]]:
    async def work() -> list[list[Completion]]:
        engine = engine_at(server, sampling)
        await engine.load_weights(model, 0)
        answers = []
        for _ in range(times):
            requests = [
                engine.complete(prompt, completion_seed(0, position, index))
                for position, prompt in enumerate(PROMPTS)
                for index in range(8)
            ]
            answers.append(list(await asyncio.gather(*requests)))
        await engine.close()
        return answers

    return asyncio.run(work())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_trainers_own(server: Path, model: Path, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=temperature, stop_token_ids=(2,))
    (completions,) = ask(server, model, sampling)
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    gaps = [
        abs(ours - theirs)
        for prompt, completion in zip(prompts, completions, strict=True)
        for ours, theirs in zip(
            trainer_logprobs(model, prompt, completion, temperature),
            logprobs(completion),
            strict=True,
        )
    ]
    print(
        f"mean gap {sum(gaps) / len(gaps):.2g}, largest {max(gaps):.2g}, over {len(gaps)} tokens"
    )
    assert sum(gaps) / len(gaps) < 0.01


def test_the_same_seeds_give_the_same_tokens_and_others_do_not(
    server: Path, model: Path
) -> None:
    first, second = ask(server, model, SAMPLING, times=2)
    assert [completion.token_ids for completion in first] == [
        completion.token_ids for completion in second
    ]
    assert len({completion.token_ids for completion in first}) > 28


def test_a_completion_ends_with_its_end_token_or_at_its_limit(
    server: Path, model: Path
) -> None:
    ends = (2, *range(6, 26))  # vLLM ends at the model's own end token in any case
    (completions,) = ask(server, model, SamplingParams(max_tokens=12, stop_token_ids=ends))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) <= 12 and len(logprobs(completion)) == len(
            completion.token_ids
        )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_engine_and_trainer_agree_on_every_step(
    server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    gaps, version = train(server, model, tmp_path, monkeypatch, lora=lora, syncs=True)
    print(f"gaps by step, synced: {gaps}")
    assert len(gaps) == 4 and max(gaps) < 0.01
    assert version == "3"


@pytest.mark.verify
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_without_the_sync_they_drift_apart(
    server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    gaps, version = train(server, model, tmp_path, monkeypatch, lora=lora, syncs=False)
    print(f"gaps by step, frozen: {gaps}")
    assert gaps[0] < 0.01 and gaps[-1] > 0.05
    assert version == "0"


def train(
    server: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lora: bool,
    syncs: bool,
) -> tuple[list[float], str]:
    """Train four steps at a large rate; return the gap of each, and the version that the engine says it holds."""
    import torch

    from ycore.engine.weights import write_weights

    ask(server, model, SAMPLING)  # the checkpoint's weights, as version 0
    (tmp_path / "their_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = make_trainer(model, tmp_path, lora=lora)
    weights = tmp_path / "weights"

    def share(version: int) -> Path:
        write_weights(trainer.bare_model, weights, dtype=torch.float32, version=version)
        return weights

    rounds = Controller(
        engines=[engine_at(server)],
        scoring=rules_alone(
            pool_in(
                tmp_path / "run",
                RewardConfig(reward="their_rewards.py:spread"),
                settings=RewardSettings(workers=1),
            )
        ),
        draws=DrawSource(
            [Prompt(row=row, content=str(row)) for row in range(len(PROMPTS))],
            seed=0,
            encode=lambda prompt: tuple(PROMPTS[prompt.row]),
            max_prompt_tokens=32,
        ),
        rules=Rules(group_size=4, seed=0, reward_weights=(1.0,)),
        peers=Peers(),
        share_weights=share if syncs else None,
    )
    rounds.record = trainer.record
    trainer.rounds = rounds
    try:
        rounds.start(timeout_s=60)
        trainer.train()
    finally:
        rounds.close()
    metric_names = (
        "ycore/logprob_gap",
        "ycore/stale_gap",
    )  # one or the other, by the version that the engine says it holds
    gaps = [
        row[name] for row in trainer.state.log_history for name in metric_names if name in row
    ]
    return gaps, told_version(server)


def test_a_sync_that_does_not_arrive_is_an_error_on_that_step(
    server: Path, model: Path, tmp_path: Path
) -> None:
    """Each weight moved a little: all of it is sent, one tensor left out, half of one, and some at wrong places."""
    import torch

    moved = {
        name: tensor + 1e-3 * torch.ones_like(tensor)
        for name, tensor in stored_in(model).items()
    }
    sums = {name: tensor_sums(tensor) for name, tensor in moved.items()}
    left_out = "model.layers.1.self_attn.k_proj.weight"
    half = "model.layers.0.mlp.down_proj.weight"
    file = tmp_path / "model-00000.safetensors"

    def send(tensors: dict[str, Any], version: int) -> float:
        save_file(tensors, file)
        write_manifest(tmp_path, version, sums)

        async def work() -> float:
            engine = engine_at(server)
            await engine.load_weights(tmp_path, version)
            await engine.complete([9, 8, 7], 1)
            await engine.close()
            return engine.verified_share

        return asyncio.run(work())

    old = stored_in(model)
    all_of_them = f"{len(sums)} of {len(sums)}"
    with pytest.raises(
        SyncError,
        match=rf"rollout-0: policy version 1: {all_of_them} tensors are not the trainer's",
    ):
        send(old, 1)  # a file that nobody had written anew
    with pytest.raises(
        SyncError, match=r"policy version 2: 1 of .*layers.1.self_attn.k_proj.weight"
    ):
        send({name: tensor for name, tensor in moved.items() if name != left_out}, 2)
    with pytest.raises(
        SyncError, match=r"policy version 3: 1 of .*layers.0.mlp.down_proj.weight"
    ):
        send({**moved, half: torch.cat([moved[half][:10], old[half][10:]])}, 3)
    key, value = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")
    with pytest.raises(
        SyncError, match=r"policy version 4: 2 of .*k_proj.weight, model.*v_proj.weight"
    ):
        send({**moved, key: moved[value], value: moved[key]}, 4)
    with pytest.raises(
        SyncError, match=r"policy version 5: 1 of .*layers.0.mlp.down_proj.weight"
    ):
        send({**moved, half: moved[half].roll(1, 0)}, 5)
    assert send(moved, 6) == 1.0
    assert told_version(server) == "6"
    with pytest.raises(
        SyncError, match=r"stale weights: .* holds policy version 6, and 7 was to be sent"
    ):
        asyncio.run(engine_at(server).load_weights(tmp_path, 7))


class Counted(Bucket):
    counts: ClassVar[list[int]]

    def fill(self) -> Iterator[list[Entry]]:
        for entries in super().fill():
            self.counts.append(len(entries))
            yield entries


class LeftOut(Bucket):
    def fill(self) -> Iterator[list[Entry]]:
        return (
            entries[:-1] if number == 1 else entries
            for number, entries in enumerate(super().fill())
        )


class AgentExit(Bucket):
    def fill(self) -> Iterator[list[Entry]]:
        return islice(super().fill(), 2)


class Shrunk(Bucket):
    def fill(self) -> Iterator[list[Entry]]:
        for entries in super().fill():
            self._memory[100:] = 0
            yield entries


def test_weights_from_the_trainers_memory_are_those_of_files(
    server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several buckets bring them, into which the largest weight just fits; then buckets are cut short."""
    import torch
    from transformers import AutoModelForCausalLM

    from ycore.engine import shared_bucket
    from ycore.engine.weights import engine_weights, note_weights, write_weights

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    source = WeightSource(
        partial(engine_weights, policy, dtype=torch.float32), torch.device("cpu")
    )
    largest = max(weight.nbytes for _, weight in source.weights())
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", largest // 2)
    files, shared = tmp_path / "files", tmp_path / "shared"
    counts = Counted.counts = []

    def send(folder: Path, version: int, bucket: type[Bucket] | None) -> list[Completion]:
        async def work() -> list[Completion]:
            engine = engine_at(server)
            if bucket is not None:
                engine.source = source
                monkeypatch.setattr(vllm_engine, "Bucket", bucket)
            try:
                await engine.load_weights(folder, version)
                assert engine.verified_share == 1.0
                return [await engine.complete(prompt, 0, greedy=True) for prompt in PROMPTS]
            finally:
                await engine.close()

        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.0 if version == 2 else 1.05)
        if bucket is None:
            write_weights(policy, folder, dtype=torch.float32, version=version)
        else:
            note_weights(policy, folder, dtype=torch.float32, version=version)
        return asyncio.run(work())

    from_memory, from_files = send(shared, 1, Counted), send(files, 2, None)
    assert len(counts) > 2 and sum(counts) == len(list(source.weights()))
    assert [file.stat().st_size for file in shared.glob("*.bucket")] == [largest]
    assert [(completion.token_ids, completion.logprobs) for completion in from_memory] == [
        (completion.token_ids, completion.logprobs) for completion in from_files
    ]
    for version, (bucket, message) in enumerate(
        [(LeftOut, "1 of"), (AgentExit, r"\d\d of"), (Shrunk, r"\d\d of")], 3
    ):
        with pytest.raises(
            SyncError,
            match=rf"rollout-0: policy version {version}: {message} .* not the trainer's",
        ):
            send(shared, version, bucket)
    assert [completion.logprobs for completion in send(shared, 6, Bucket)] != [
        completion.logprobs for completion in from_memory
    ]
    assert told_version(server) == "6"


@pytest.mark.verify
def test_adapters_alone_give_what_merged_weights_give(
    server: Path, adapter_server: Path, model: Path, tmp_path: Path
) -> None:
    """Compare tokens at temperature 0 and log-probabilities, over two versions; then a sync does not arrive."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from ycore.engine import weights
    from ycore.engine.weights import write_adapters, write_weights

    torch.manual_seed(0)
    lora = LoraConfig(
        r=6,
        lora_alpha=24,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora
    )
    base = next(
        parameter
        for name, parameter in policy.named_parameters()
        if name.endswith("q_proj.base_layer.weight")
    )
    merged, alone = tmp_path / "merged", tmp_path / "alone"

    async def ask_both(version: int) -> list[list[Completion]]:
        answers = []
        for socket, folder in ((server, merged), (adapter_server, alone)):
            engine = engine_at(socket)
            try:
                await engine.load_weights(folder, version)
                answers.append(
                    [await engine.complete(prompt, 0, greedy=True) for prompt in PROMPTS]
                )
                assert engine.verified_share == 1.0
            finally:
                await engine.close()
        return answers

    async def send(version: int) -> None:
        engine = engine_at(adapter_server)
        try:
            await engine.load_weights(alone, version)
        finally:
            await engine.close()

    def change() -> None:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.mul_(1.5 if ".lora_" in name else 1.0)

    said = []
    for version in (1, 2):
        change()
        size = write_weights(policy, merged, dtype=torch.float32, version=version)
        assert write_adapters(policy, alone, dtype=torch.float32, version=version) < size
        ours, theirs = asyncio.run(ask_both(version))
        assert [completion.token_ids for completion in ours] == [
            completion.token_ids for completion in theirs
        ]
        for completion, other in zip(ours, theirs, strict=True):
            assert logprobs(completion) == pytest.approx(logprobs(other), abs=1e-4)
        said.append([completion.token_ids for completion in ours])
    assert said[0] != said[1], "the second version says something else"

    stale = (alone / "adapter_model.safetensors").read_bytes()
    change()
    write_adapters(policy, alone, dtype=torch.float32, version=3)
    (alone / "adapter_model.safetensors").write_bytes(stale)
    with pytest.raises(
        SyncError,
        match=r"rollout-0: policy version 3: 28 of .* not the trainer's .*lora_A.weight",
    ):
        asyncio.run(send(3))
    with torch.no_grad():
        base.add_(1e-3)
    weights._BASE_SUMS.clear()
    write_adapters(policy, alone, dtype=torch.float32, version=4)
    with pytest.raises(
        SyncError, match=r"policy version 4: 1 of .* not the trainer's .*q_proj.weight"
    ):
        asyncio.run(send(4))


WORLD = """
class World:
    def reset(self, **row):
        self.turns = 0

    def step(self, text: str):
        self.turns += 1
        return f"{text[-1:]} and {len(text)}" if self.turns < 3 else None
"""
AGENT = """
import json, os
from openai import OpenAI

client, messages = OpenAI(), json.loads(os.environ["YCORE_ROW"])["prompt"]
for _ in range(3):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    answer = f"{said.content[-1:]} and {len(said.content)}"
    messages += [said, {"role": "user", "content": answer}]
"""


def test_the_openai_client_is_answered_as_an_environment_inside_is(
    server: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give equal prompts, tokens, masks and log-probabilities by the same seeds, turn by turn."""
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "my_agent.py").write_text(AGENT)
    tokenizer = AutoTokenizer.from_pretrained(model)
    inside = Dialogue(tokenizer, ToolSet((), takes_text=True), actions="template")
    through = Dialogue(tokenizer, ToolSet(()), actions="template", users_answer=True)
    settings: Any = {
        "model": "m",
        "dataset": "d",
        "output": "run",
        "rewards": [{"reward": "environment"}],
    }
    folder = RunFolder(tmp_path / "run")
    limits = TurnLimits(3, 200, turn_tokens=24, max_prompt_tokens=50)
    slow: Any = {"call_s": 60, "completion_s": 280}
    pool = ToolPool(RunConfig(**settings, env="world.py:World", turns=slow), folder)
    agents = AgentPool(
        RunConfig(**settings, agent=f"{sys.executable} my_agent.py", turns=slow), folder
    )
    kinds = [
        MultiTurnWriter(lambda _: inside, pool, limits, pays=False),
        AgentWriter(lambda tools: through, agents, limits),
    ]

    async def play() -> list[list[Completion]]:
        engine = engine_at(
            server, SamplingParams(max_tokens=24, stop_token_ids=(2, *range(6, 40)))
        )
        await engine.load_weights(model, 0)
        completions = []
        for kind in kinds:
            played = []
            for position, text in enumerate(("ab", "Go", "9?")):
                prompt = Prompt(position, [{"role": "user", "content": text}])
                start = GroupStart(
                    Draw(position, prompt, inside.prompt_ids(prompt.content)), prompt
                )
                completion = await kind.write(start, 0, engine.complete, seed=0)
                played.append(
                    replace(
                        completion, prompt_ids=completion.prompt_ids or start.draw.token_ids
                    )
                )
            completions.append(played)
            await kind.close()
        await engine.close()
        return completions

    ours, theirs = asyncio.run(play())
    for completion, other in zip(ours, theirs, strict=True):
        assert (completion.prompt_ids, completion.token_ids, completion.mask) == (
            other.prompt_ids,
            other.token_ids,
            other.mask,
        )
        assert logprobs(completion) == pytest.approx(logprobs(other), abs=1e-4)
    assert max(sum(turn.by_policy for turn in completion.turns) for completion in ours) == 3


def told_version(server: Path) -> str:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(server)), base_url="http://rollout-0"
    ) as client:
        return str(client.get("/weight_info").json()["weight_version"])


def make_trainer(model: Path, output: Path, *, lora: bool) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from ycore.trl.build import placeholder_rewards
    from ycore.trl.seam import SeamGRPOTrainer

    return SeamGRPOTrainer(
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
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        if lora
        else None,
    )


def logprobs(completion: Completion) -> tuple[float, ...]:
    assert completion.logprobs is not None
    return completion.logprobs


def trainer_logprobs(
    model: Path, prompt: list[int], completion: Completion, temperature: float
) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tokens = list(completion.token_ids)
    with torch.no_grad():
        logits = (
            loaded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            / temperature
        )
    values: list[float] = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return values


def test_the_probability_of_given_tokens_and_greedy_completions_are_the_models_own(
    server: Path, model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    context, target = [9, 8, 7], [30, 31, 32]

    async def work() -> tuple[tuple[float, ...], Completion, Completion]:
        engine = engine_at(server, SamplingParams(max_tokens=4, temperature=2.0))
        try:
            await engine.load_weights(model, 0)
            greedy = [await engine.complete(context, seed, greedy=True) for seed in (1, 2)]
            return await engine.logprobs_of(context, target), greedy[0], greedy[1]
        finally:
            await engine.close()

    logprobs, first, second = asyncio.run(work())
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = policy(torch.tensor([[*context, *target]])).logits[0].log_softmax(-1)
    assert logprobs == pytest.approx(
        [rows[2 + place, token].item() for place, token in enumerate(target)], abs=1e-3
    )
    assert first.token_ids == second.token_ids, "the seed plays no part"
    assert first.token_ids[0] == int(rows[2].argmax())


def test_each_token_of_a_stream_has_its_versions_logprob(
    server: Path, model: Path, tmp_path: Path
) -> None:
    """Weights come in the middle of completions; a whole recomputation under each version says the same."""
    folders = [model]
    for version in range(1, 5):
        folder = write_tiny_model(tmp_path / str(version), seed=version)
        sums = {name: tensor_sums(tensor) for name, tensor in stored_in(folder).items()}
        write_manifest(folder, version, sums)
        folders.append(folder)
    (tmp_path / "spread.py").write_text(REWARD)
    rules = Rules(group_size=2, seed=1, reward_weights=(1.0,))
    pool = pool_in(
        tmp_path / "run",
        RewardConfig(reward=f"{tmp_path}/spread.py:spread"),
        settings=RewardSettings(workers=1, deadline_s=30),
    )
    in_flight = InFlight(
        lambda ids: str(len(ids)), max_tokens=200, max_age=3, seed=1, group_size=2, streams=True
    )
    prompts = [Prompt(row, "") for row in range(len(PROMPTS))]
    controller = ControllerAhead(
        num_steps=5,
        max_staleness=3,
        engines=[engine_at(server, SamplingParams(max_tokens=200))],
        scoring=rules_alone(pool),
        draws=DrawSource(
            prompts,
            seed=0,
            encode=lambda prompt: tuple(PROMPTS[prompt.row]),
            max_prompt_tokens=50,
        ),
        rules=rules,
        share_weights=folders.__getitem__,
        in_flight=in_flight,
        max_surplus_age=3,
    )
    try:
        controller.start(timeout_s=60)
        groups = [group for step in range(5) for group in taken(controller, step)]
    finally:
        controller.close()
    written = [(group.draw, completion) for group in groups for completion in group.completions]
    assert any(len(completion.versions) > 1 for _, completion in written), (
        "no completion met new weights"
    )
    for draw, completion in written:
        start = 0
        for end, version in completion.versions:
            expected = trainer_logprobs(folders[version], list(draw.token_ids), completion, 1.0)
            assert logprobs(completion)[start:end] == pytest.approx(
                expected[start:end], abs=2e-3
            )
            start = end
        assert start == len(completion.token_ids) <= 200


def taken(controller: Controller, step: int) -> list[Group]:
    groups = controller.next_round(step=step, num_groups=2)
    time.sleep(0.3)  # as if it trained
    return groups
