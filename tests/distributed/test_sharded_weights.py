"""FSDP2's shards, on two real ranks or twice on four: the engine gets whole weights, a rank that does not write keeps none.

accelerate shards nothing on CPU, so torch's own `fully_shard` stands in for it here, over the mesh that accelerate makes.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model

WORKER = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from ycore.engine.weights import write_weights

model_folder, output, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
if kind == "lora":
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if dist.get_rank() == 0:
        merged = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
        )
        merged.load_state_dict(model.state_dict())
        merged.merge_and_unload().save_pretrained(output / "expected")
    dist.barrier()
base = model.get_base_model() if kind == "lora" else model
sizes = ParallelismConfig(dp_replicate_size=dist.get_world_size() // 2, dp_shard_size=2)
mesh = sizes.build_device_mesh("cpu")[tuple(sizes.fsdp_dim_names)]
for layer in base.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
assert sum(isinstance(value, DTensor) for value in model.parameters()) > 5
written = write_weights(model, output / "seen", dtype=torch.float32, writes=dist.get_rank() == 0)
assert (written > 0) == (dist.get_rank() == 0)
dist.destroy_process_group()
"""


def shard(folder: Path, kind: str, *, num_ranks: int) -> tuple[dict[str, torch.Tensor], Path]:
    write_tiny_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder / "model"), str(folder), kind],
            env={**os.environ, **common, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(said)
    seen = {
        name: value
        for file in (folder / "seen").glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    return seen, folder


RANKS = pytest.mark.parametrize("num_ranks", [2, 4], ids=["fsdp2", "hsdp"])


@pytest.mark.verify
@RANKS
def test_full_weights_are_whole_again(tmp_path: Path, num_ranks: int) -> None:
    seen, folder = shard(tmp_path, "full", num_ranks=num_ranks)
    expected = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).state_dict()
    assert seen.keys() == expected.keys() - {"lm_head.weight"}, "tied weights come once"
    assert all(torch.equal(seen[name], expected[name]) for name in seen)


@pytest.mark.verify
@RANKS
def test_adapters_are_merged_from_their_shards(tmp_path: Path, num_ranks: int) -> None:
    seen, folder = shard(tmp_path, "lora", num_ranks=num_ranks)
    expected = AutoModelForCausalLM.from_pretrained(
        folder / "expected", dtype=torch.float32
    ).state_dict()
    assert seen.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.allclose(seen[name], expected[name], atol=1e-6) for name in seen)
