"""An engine of two workers beside one of one, on a CPU in float32: the same policy, and every shard of it is proved."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_model import write_tiny_model
from ycore.engine import SamplingParams, commands
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import tensor_sums, write_manifest
from ycore.errors import SyncError
from ycore.placement.placement import ROLLOUT
from ycore.run.files import RunFolder
from ycore.types import Completion

CORES = sorted(os.sched_getaffinity(0))[:2]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.verify,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.skipif(len(CORES) < 2, reason="two workers need two cores"),
]
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(2,))
PROMPTS = [[9, 8, 7], [30, 31, 32, 33, 34, 35, 36], [50], [60, 61]]

# Loaded by both workers in place of the engine's own class; the second one loads nothing while a file is there.
SKIPS = """
import os
from ycore.engine import vllm_extension
from ycore.engine.vllm_extension import PolicyWorker, held_pieces

class SkippingWorker(PolicyWorker):
    def load_policy(self, weights_path):
        if self.rank == 1 and os.path.exists(os.path.join(weights_path, "skip")):
            workers = self.parallel_config.tensor_parallel_size
            return held_pieces(self.model_runner.get_model(), dtype=self.model_config.dtype, workers=workers)
        return super().load_policy(weights_path)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 4 heads and 1 KV head, which both workers have; 102 tokens, so the second has rows of zeros."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    config = LlamaConfig.from_pretrained(
        folder, num_attention_heads=4, num_key_value_heads=1, head_dim=32
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(
    model: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[list[Path]]:
    """The sockets of the engine of one worker and of that of two."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    modules = tmp_path_factory.mktemp("modules")
    (modules / "skipping.py").write_text(SKIPS)
    one_worker = cpu_engine(folder, model, max_model_len=64)
    two_workers = cpu_engine(
        folder, model, max_model_len=64, name="rollout-1", socket=folder.socket("rollout-1"), cores=tuple(CORES),
        tensor_parallel=2,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{modules}:{os.environ.get('PYTHONPATH', '')}")
        patch.setitem(
            commands._ROLE_OPTIONS[ROLLOUT], "--worker-extension-cls", "skipping.SkippingWorker"
        )
        with serve(folder, [one_worker, two_workers]):
            yield [one_worker.socket, two_workers.socket]


def send(
    sockets: list[Path], folder: Path, tensors: dict[str, Any], version: int
) -> list[list[Completion]]:
    """Write the weights, have every engine load them, and take its completions."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_manifest(
        folder, version, {name: tensor_sums(tensor) for name, tensor in tensors.items()}
    )

    async def completions_of(socket: Path) -> list[Completion]:
        engine = VllmEngine(socket.stem, socket, SAMPLING, request_timeout_s=60)
        try:
            await engine.load_weights(folder, version)
            assert engine.verified_share == 1.0
            drawn = [engine.complete(ids, seed) for ids in PROMPTS for seed in range(4)]
            return list(await asyncio.gather(*drawn))
        finally:
            await engine.close()

    async def all_asked() -> list[list[Completion]]:
        return [await completions_of(socket) for socket in sockets]

    return asyncio.run(all_asked())


def test_two_workers_are_one_policy_and_a_skipped_shard_is_found(
    engines: list[Path], model: Path, tmp_path: Path
) -> None:
    import torch

    (stored,) = model.glob("*.safetensors")
    first = load_file(stored)
    moved = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in first.items()}
    answers = []
    for version, tensors in enumerate((first, moved)):
        of_one_worker, of_two_workers = send(engines, tmp_path, tensors, version)
        assert [completion.token_ids for completion in of_two_workers] == [
            completion.token_ids for completion in of_one_worker
        ]
        pairs = zip(of_one_worker, of_two_workers, strict=True)
        gap = max(
            abs(a - b)
            for x, y in pairs
            for a, b in zip(x.logprobs or (), y.logprobs or (), strict=True)
        )
        print(f"version {version}: largest difference of a log-probability {gap:.2g}")
        assert gap < 5e-5
        answers.append(of_two_workers)
    assert [completion.logprobs for completion in answers[0]] != [
        completion.logprobs for completion in answers[1]
    ]
    (tmp_path / "skip").touch()
    with pytest.raises(
        SyncError,
        match=r"rollout-1: policy version 2: \d+ of \d+ tensors are not the trainer's",
    ):
        send(engines[1:], tmp_path, first, 2)
    (tmp_path / "skip").unlink()
    send(engines[1:], tmp_path, first, 3)
