"""The patches of vLLM: parameter names, and a sampler with the right distribution, a function of the seed alone."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

import torch
from vllm import ir
from vllm.v1.sample.ops import logprobs as logprobs_ops
from vllm.v1.sample.ops import topk_topp_sampler as stock

from ycore.engine.commands import REPEATABLE
from ycore.engine.vllm_extension import (
    checkpoint_names,
    column_shard_of,
    draw_tokens,
    expert_pieces,
    held_pieces,
    multiply_rows_alike,
    parts_of,
    rotate_single_heads,
    saved_names,
    use_faster_sampler,
)
from ycore.engine.weight_proof import check_read_back, part_sums, pieces_of, tensor_sums
from ycore.errors import SyncError


@pytest.fixture
def sampler() -> Iterator[stock.TopKTopPSampler]:
    before = stock.TopKTopPSampler.forward_cpu
    use_faster_sampler()
    yield stock.TopKTopPSampler("processed_logprobs")
    stock.TopKTopPSampler.forward_cpu = before


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_what_it_replaces_is_as_it_was_when_this_was_written() -> None:
    forward = inspect.signature(stock.TopKTopPSampler.forward_cpu)
    assert list(forward.parameters) == ["self", "logits", "generators", "k", "p"]
    assert list(inspect.signature(stock.apply_top_k_top_p).parameters)[:3] == [
        "logits",
        "k",
        "p",
    ]
    assert list(inspect.signature(logprobs_ops.batched_count_greater_than).parameters) == [
        "x",
        "values",
    ]


@pytest.mark.parametrize("is_neox", [False, True])
def test_queries_of_several_heads_are_rotated_as_in_a_row(
    is_neox: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernel for CPUs gave DeepSeek's heads, where no yarn is, the rotations of other tokens."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    rotate_single_heads()
    with set_current_vllm_config(VllmConfig()):
        rotation = {"rope_type": "default", "rope_theta": 1e4}
        rope = get_rope(
            64,
            max_position=32,
            rope_parameters=rotation,
            is_neox_style=is_neox,
            dtype=torch.float32,
        )
    positions, heads, key = torch.arange(12), torch.randn(12, 2, 96), torch.randn(12, 1, 64)
    query = heads[..., 32:]
    in_a_row, _ = rope.forward_cpu(positions, query.flatten(1), key.flatten(1))
    apart, rotated_key = rope.forward_cpu(positions, query.clone(), key.clone())
    assert torch.allclose(apart.flatten(1), in_a_row, atol=1e-5)
    assert torch.allclose(rotated_key[1], rope.forward_native(positions, query, key)[1][1])


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Multiply as an engine that must repeat itself, on one thread."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "cpu_unquantized_gemm", stock_multiplication)
    monkeypatch.setenv(REPEATABLE, "1")
    multiply_rows_alike()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stock_multiplication(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    return layer.cpu_linear(x, weight, bias)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]
)
def test_what_a_row_is_multiplied_to_does_not_depend_on_the_others(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """SmolLM2-135M's layers. In float32 a row alone takes another kernel; in bfloat16 with AMX few rows do."""
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(*shape, bias=False).to(dtype)
    rows = torch.randn(70, shape[0], generator=torch.Generator().manual_seed(0)).to(dtype)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    multiply = utils.dispatch_unquantized_gemm()
    together = multiply(layer, rows, layer.weight)
    for count in (1, 2, 3, 8, 17, 31, 48):
        assert torch.equal(
            multiply(layer, rows[:count].clone(), layer.weight), together[:count]
        ), count
        assert torch.equal(
            multiply(layer, rows[None, 5 : 5 + count], layer.weight)[0], together[5 : 5 + count]
        ), count


def test_tokens_come_as_often_as_they_are_likely(sampler: stock.TopKTopPSampler) -> None:
    """60,000 draws against 5 probabilities: chi-square with 4 degrees of freedom, 23.5 at one in 10,000."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.045, 0.005])
    counts, draws = torch.zeros(5), 60_000
    request_generators = generators(*range(500))
    for _ in range(draws // 500):
        tokens, _ = sampler.forward(
            probabilities.log().expand(500, 5).clone(), request_generators, None, None
        )
        counts += torch.bincount(tokens, minlength=5)
    expected = probabilities * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


def test_a_draw_is_a_function_of_its_own_seed(sampler: stock.TopKTopPSampler) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    together, _ = sampler.forward(logits.clone(), generators(7, 8, 9), None, None)
    alone, _ = sampler.forward(logits[2:].clone(), generators(9), None, None)
    other, _ = sampler.forward(logits.clone(), generators(17, 18, 19), None, None)
    assert together[2] == alone[0]
    assert together.tolist() != other.tolist()


def test_a_request_draws_anew_for_every_token(sampler: stock.TopKTopPSampler) -> None:
    request_generators = generators(1)
    drawn = {
        int(sampler.forward(torch.zeros(1, 1000), request_generators, None, None)[0])
        for _ in range(20)
    }
    assert len(drawn) > 15


def test_logprobs_are_those_that_were_drawn_from(sampler: stock.TopKTopPSampler) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    k = torch.tensor([3, 50])
    tokens, logprobs = sampler.forward(logits.clone(), generators(1, 2), k, None)
    kept = logits[0].topk(3).indices
    assert tokens[0] in kept and torch.isinf(logprobs[0]).sum() == 47
    assert torch.allclose(logprobs[0][kept], logits[0][kept].log_softmax(0))
    assert torch.allclose(logprobs[1], logits[1].log_softmax(0))


def test_requests_without_a_seed_may_stand_beside_others(
    sampler: stock.TopKTopPSampler,
) -> None:
    tokens, _ = sampler.forward(
        torch.zeros(2, 100), {1: torch.Generator().manual_seed(3)}, None, None
    )
    alone, _ = sampler.forward(torch.zeros(1, 100), generators(3), None, None)
    assert tokens[1] == alone[0]


def test_a_token_is_drawn_by_its_share_and_never_without_one() -> None:
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    numbers = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1].unsqueeze(1)
    drawn = draw_tokens(shares.repeat(10_000, 1), numbers)
    counts = torch.bincount(drawn, minlength=6) / 10_000
    assert torch.allclose(counts, shares, atol=2e-4) and counts[[0, 2, 5]].sum() == 0


def test_the_largest_number_draws_the_last_token_that_has_a_share() -> None:
    probabilities = torch.nn.functional.pad(torch.rand(200, 5_000).softmax(-1), (0, 3))
    largest = torch.full((200, 1), 1 - 2**-53, dtype=torch.float64)
    drawn = draw_tokens(probabilities, largest)
    assert drawn.max() < 5_000 and drawn.min() > 4_990


@pytest.fixture
def norm() -> Iterator[Any]:
    """Return the operation as a worker chooses it; the patches allow the C kernel."""
    op = ir.ops.fused_add_rms_norm
    priority = op.get_priority()
    op.set_default(["native"])
    yield op
    type(op).set_default(op, priority)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_in_c_is_pytorchs(norm: Any, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 37, 64, dtype=dtype)
    weight = torch.rand(64, dtype=dtype)
    expected = norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    returned = norm(x.clone(), residual.clone(), weight, 1e-6)
    for tensor, wanted in zip(returned, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-2, atol=1e-2)


def test_rows_that_lie_apart_keep_pytorchs_norm(norm: Any) -> None:
    apart = torch.randn(5, 3, 64)[:, 1]
    packed = apart.contiguous()
    weight = torch.rand(64)
    assert norm.dispatch(apart, packed, weight, 1e-6).provider == "native"
    assert norm.dispatch(packed, apart, weight, 1e-6).provider == "native"
    assert norm.dispatch(packed, packed, weight, 1e-6).provider == "vllm_c"


def test_a_bias_that_a_cpu_keeps_in_float32_is_known_by_its_value() -> None:
    """vLLM's packed layers do so in bfloat16, and the eyes of a policy that sees have such biases."""
    sent = torch.randn(6).bfloat16()
    layer = torch.nn.Linear(4, 6)
    layer.weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))

    def share(bias: torch.Tensor) -> float:
        layer.bias = torch.nn.Parameter(bias)
        pieces = held_pieces(torch.nn.Sequential(layer), dtype=torch.bfloat16)
        return check_read_back({"0.bias": tensor_sums(sent)}, pieces)

    assert share(sent.float()) == 1.0
    with pytest.raises(SyncError, match="not the trainer's"):
        share(sent.float() * 2)


class Fused(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(4, 6, bias=False)
        self.gate_up_proj.output_partition_sizes = [3, 3]  # type: ignore[assignment]


class InheritsIt(Fused):
    """Inherits the mapping, as vLLM's Mistral does from Llama: every Mistral was refused at its first sync."""


class HasItsOwn(Fused):
    """Sets its own mapping, as vLLM's backend for transformers' models does (SmolLM3, OLMo 2 and 3)."""

    packed_modules_mapping: ClassVar = {}

    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping = Fused.packed_modules_mapping


@pytest.mark.parametrize("kind", [Fused, InheritsIt, HasItsOwn])
def test_what_vllm_fuses_is_known_by_the_checkpoints_names(kind: type[Fused]) -> None:
    """It is known so whether the checkpoint has it apart, or in one as vLLM has (GLM-4)."""
    model = kind()
    whole = model.gate_up_proj.weight
    gate, up = whole.chunk(2)
    pieces = held_pieces(model, dtype=torch.float32)
    for sent in (
        {"gate_proj.weight": gate, "up_proj.weight": up},
        {"gate_up_proj.weight": whole},
    ):
        sums = {name: tensor_sums(weight) for name, weight in sent.items()}
        assert check_read_back(sums, pieces) == 1.0
    with pytest.raises(SyncError, match="not the trainer's"):
        check_read_back({"gate_up_proj.weight": tensor_sums(whole.flip(0))}, pieces)


def test_a_routers_bias_is_proved_in_float32_and_its_weights_in_the_engines_dtype() -> None:
    router = torch.nn.Linear(4, 8, bias=False)  # vLLM keeps a router in float32
    router.weight.data = router.weight.data.bfloat16().float()
    router.e_score_correction_bias = torch.nn.Parameter(torch.randn(8))
    sent = {
        "0.weight": router.weight.bfloat16(),
        "0.e_score_correction_bias": router.e_score_correction_bias,
    }
    pieces = held_pieces(torch.nn.Sequential(router), dtype=torch.bfloat16)
    sums = {name: tensor_sums(weight) for name, weight in sent.items()}
    assert check_read_back(sums, pieces) == 1.0


def test_parameters_are_named_as_checkpoints_name_them() -> None:
    """vLLM's own table of a model names them: LLaVA's of today and of before, of which one is sent."""
    mapper = SimpleNamespace(
        orig_to_new_prefix={"model.vision_tower.": "vision_tower.", "lm_head.": None}
    )
    model = SimpleNamespace(hf_to_vllm_mapper=mapper)
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = "vision_tower.layers.0"
    saved = saved_names(f"{layer}.qkv_proj.weight", model)
    assert [checkpoint_names(name, fused) for name in saved] == [
        [f"{beginning}{layer}.{part}_proj.weight" for part in "qkv"]
        for beginning in ("", "model.")
    ]
    assert saved_names("lm_head.weight", model) == ["lm_head.weight"]
    assert saved_names("weight", torch.nn.Linear(1, 1)) == ["weight"]


# -- shards of several workers ------------------------------------------------------------------------------------


def shards_of(layers: list[Any], names: list[str], shards: list[torch.Tensor]) -> list[Any]:
    return [
        piece
        for layer, shard in zip(layers, shards, strict=True)
        for piece in pieces_of(
            names,
            part_sums(shard, parts_of(layer)),
            column_shard=column_shard_of(layer, "weight"),
        )
    ]


@pytest.mark.parametrize(("kv_heads", "copies"), [(4, 1), (2, 2), (1, 4)])
def test_query_key_and_value_of_four_workers_add_up(kv_heads: int, copies: int) -> None:
    """Layers as vLLM's `QKVParallelLinear` describes itself; with few KV heads several workers have the same one."""
    tensors = {
        "q": torch.randn(64, 16),
        "k": torch.randn(8 * kv_heads, 16),
        "v": torch.randn(8 * kv_heads, 16),
    }
    layers = [
        SimpleNamespace(
            tp_rank=rank,
            tp_size=4,
            output_partition_sizes=[16, 8, 8],
            num_kv_head_replicas=copies,
        )
        for rank in range(4)
    ]
    heads = {name: tensor.split(16 if name == "q" else 8) for name, tensor in tensors.items()}
    shards = [
        torch.cat([heads["q"][rank], heads["k"][rank // copies], heads["v"][rank // copies]])
        for rank in range(4)
    ]
    sent = {name: tensor_sums(tensor) for name, tensor in tensors.items()}
    assert check_read_back(sent, shards_of(layers, ["q", "k", "v"], shards)) == 1.0
    merged = {"qkv": tensor_sums(torch.cat(list(tensors.values())))}
    assert check_read_back(merged, shards_of(layers, ["qkv"], shards)) == 1.0
    for old in range(4):
        skipped = [shard + 1 if rank == old else shard for rank, shard in enumerate(shards)]
        with pytest.raises(SyncError, match="3 of 3 tensors are not the trainer's"):
            check_read_back(sent, shards_of(layers, ["q", "k", "v"], skipped))


def test_columns_and_the_vocabulary_of_two_workers_add_up() -> None:
    down, embedding = torch.randn(16, 64), torch.randn(100, 16)
    padded = torch.cat([embedding, torch.zeros(28, 16)])
    columns = [
        SimpleNamespace(
            tp_rank=rank,
            tp_size=2,
            output_partition_sizes=[16],
            input_size=64,
            input_size_per_partition=32,
        )
        for rank in range(2)
    ]
    vocabulary = [
        SimpleNamespace(
            tp_rank=rank, tp_size=2, shard_indices=None, num_embeddings_per_partition=64, num_embeddings_padded=128,
            input_size=16, input_size_per_partition=16,
        )
        for rank in range(2)
    ]  # fmt: skip
    sent = {"down": tensor_sums(down), "embed": tensor_sums(embedding)}
    pieces = shards_of(columns, ["down"], list(down.split(32, dim=1)))
    pieces += shards_of(vocabulary, ["embed"], list(padded.split(64)))
    assert check_read_back(sent, pieces) == 1.0


@pytest.mark.parametrize("divides_experts", [False, True])
def test_the_experts_of_two_workers_add_up(divides_experts: bool) -> None:
    """Layers as vLLM's `RoutedExperts` describes itself, with rows and columns behind those of the checkpoint."""
    names = [
        (number, f"experts.{number}.{leaf}.", shard)
        for number in range(4)
        for leaf, shard in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    ]
    shapes = {"w1": (8, 16), "w2": (16, 8), "w3": (8, 16)}
    tensors = {f"mlp.{name}weight": torch.randn(shapes[shard]) for _, name, shard in names}

    def worker(rank: int) -> Any:
        places = range(2 * rank, 2 * rank + 2) if divides_experts else range(4)
        rows = slice(0, 8) if divides_experts else slice(4 * rank, 4 * rank + 4)
        size = rows.stop - rows.start
        of = [
            [
                tensors[f"mlp.experts.{place}.{leaf}_proj.weight"]
                for leaf in ("gate", "up", "down")
            ]
            for place in places
        ]
        pad = torch.nn.functional.pad
        return SimpleNamespace(
            layer_name="mlp.experts",
            moe_config=SimpleNamespace(
                intermediate_size_per_partition_unpadded=size,
                hidden_dim_unpadded=16,
                tp_rank=0 if divides_experts else rank,
                tp_size=1 if divides_experts else 2,
            ),
            get_expert_mapping=lambda: [
                ("w", name, number, shard) for number, name, shard in names
            ],
            _map_global_expert_id_to_local_expert_id=lambda number: (
                places.index(number) if number in places else -1
            ),
            w13_weight=torch.stack(
                [
                    torch.cat([pad(matrix[rows], (0, 0, 0, 1)) for matrix in (gate, up)])
                    for gate, up, _ in of
                ]
            ),
            w2_weight=torch.stack([pad(down[:, rows], (0, 1)) for *_, down in of]),
        )

    workers = [worker(0), worker(1)]
    sent = {name: tensor_sums(tensor) for name, tensor in tensors.items()}
    pieces = [piece for layer in workers for piece in expert_pieces(layer)]
    assert check_read_back(sent, pieces) == 1.0
    workers[1].w2_weight[1, 0, 0] += 1
    pieces = [piece for layer in workers for piece in expert_pieces(layer)]
    with pytest.raises(SyncError, match="1 of 12 tensors are not the trainer's"):
        check_read_back(sent, pieces)
