"""Extend each of vLLM's workers (`--worker-extension-cls`); importing this module patches vLLM.

On a CPU vLLM multiplies with packed copies of its weights and keeps no others. Three patches follow:
1. A reload packs only the weights that the checkpoint names. An output head that is tied to the embedding is not named,
   so it would keep the first policy's weights: `load_policy` packs it again.
2. Packed weights cannot be read back, so their sums are taken as they are packed.
3. Experts are packed again at each load, and their sums taken before; also on a device, where a kernel may want them in
   another order.
Three are for speed on a CPU: seeded sampling by one number a token in place of one a word of the vocabulary (2 ms a
decoding step instead of 45), no ranks of the sampled tokens, and norms in C. With the last, what a sequence gets does
not depend on what else is in its batch; in bfloat16 on a CPU with AMX only where it is asked for. It needs
VLLM_CPU_ATTN_SPLIT_KV=0 too, as `commands` sets it.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from ycore.engine.commands import REPEATABLE
from ycore.engine.shared_bucket import Entry, opened, weights_in
from ycore.engine.weight_proof import Part, PartSums, Piece, part_sums, pieces_of, tensor_sums
from ycore.run.reports import dump_stacks_on_signal

_BLOCK = 16  # rows
_ROUTERS_BIAS = "e_score_correction_bias"  # sent in float32
_C_NORM = "vllm_c"
PACKED_SUMS: dict[Any, list[PartSums]] = {}  # by layer, the sums of its weight as it was packed
EXPERTS: dict[Any, list[Piece]] = {}  # by layer, the pieces of its experts as they were loaded


class Worker:
    """Mixed into the worker of a model whose weights stay as they are: it has the patches of this module alone."""


class PolicyWorker(Worker):
    """Mixed into a policy's worker; its methods are called by name, over `/collective_rpc`."""

    def load_policy(self: Any, weights_path: str) -> list[Piece]:
        """Load the weights in a folder, tied ones included; return `held_pieces` of the loaded model."""
        self.reload_weights(weights_path=weights_path)
        pack_heads(self.model_runner.get_model())
        return self.held_policy()  # type: ignore[no-any-return]

    def open_bucket(self: Any, handle: str, num_bytes: int) -> None:
        """Begin to load weights that come in a `shared_bucket`; what else loads them must not come between."""
        if (
            getattr(self, "bucket", None) is not None
        ):  # a trainer that died has left it half loaded
            self.close_bucket()
        self.bucket = opened(handle, num_bytes, self.device)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load_bucket(self: Any, entries: list[Entry]) -> None:
        """Load what is in the bucket now; after it the trainer may overwrite it."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights_in(self.bucket, entries))
        if self.bucket.is_cuda:
            torch.cuda.synchronize(self.bucket.device)

    def close_bucket(self: Any) -> list[Piece]:
        """Finish loading after the last bucket; return as `load_policy`."""
        self.bucket = None
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        pack_heads(model)
        return self.held_policy()  # type: ignore[no-any-return]

    def held_policy(self: Any) -> list[Piece]:
        """Return `held_pieces` of the model and of its adapters, if it has some."""
        model = self.model_runner.get_model()
        workers = self.parallel_config.tensor_parallel_size
        return held_pieces(
            model, dtype=self.model_config.dtype, workers=workers
        ) + adapter_pieces(model)


def pack_heads(model: Any) -> None:
    """Pack a CPU's copies of output heads again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def held_pieces(model: Any, *, dtype: Any, workers: int = 1) -> list[Piece]:
    """Return the checkpoint's names and the sums of every parameter of this dtype, for `weight_proof.check_read_back`.

    A tied head has the name of the embedding, and the sums of its own packed copy. With several workers, what is left
    out is a parameter of which it is not known how they divide it.
    """
    fused_parts = getattr(model, "packed_modules_mapping", {})
    pieces: list[Piece] = []
    first_name: dict[tuple[int, torch.Size], str] = {}
    for module_name, module in model.named_modules():
        if module in EXPERTS:
            pieces += EXPERTS[module]
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}"
            if parameter.numel():
                # A tied head is the embedding; a view of another shape, as latent attention makes, is not.
                name = first_name.setdefault((parameter.data_ptr(), parameter.shape), name)
            if parameter.dtype == torch.float32 and leaf != _ROUTERS_BIAS:
                # What vLLM keeps in float32 has the values that it was sent: a CPU's biases, a router.
                parameter = parameter.to(dtype)
            packed = PACKED_SUMS.get(module) if leaf == "weight" else None
            is_norm = leaf in ("weight", "bias", _ROUTERS_BIAS)
            is_known = workers == 1 or hasattr(module, "tp_rank") or is_norm
            is_sent = parameter.dtype == dtype or leaf == _ROUTERS_BIAS
            if is_sent and is_known and (packed or parameter.numel()):
                sums = packed or part_sums(parameter, parts_of(module))
                shard = column_shard_of(module, leaf)
                for saved in saved_names(name, model):
                    # A checkpoint has the parts of a fused weight, or all in one, as vLLM has.
                    parts = checkpoint_names(saved, fused_parts)
                    fused = checkpoint_names(saved, {})
                    for names in [parts] if parts == fused else [parts, fused]:
                        pieces += pieces_of(names, sums, column_shard=shard)
    return pieces


def adapter_pieces(model: Any) -> list[Piece]:
    """Return the sums of the adapters that linear layers multiply with, in vLLM's first and only slot for adapters."""
    fused_parts = getattr(model, "packed_modules_mapping", {})
    pieces: list[Piece] = []
    for module_name, module in model.named_modules():
        stacks = [getattr(module, f"lora_{side}_stacked", None) for side in "ab"]
        for letter, stack in zip("AB", stacks, strict=True):
            names = checkpoint_names(f"{module_name}.weight", fused_parts)
            if isinstance(stack, tuple) and len(stack) == len(names):
                for name, tensor in zip(names, stack, strict=True):
                    matrix = tensor[0, 0]
                    owner = name.removesuffix("weight")
                    sums = part_sums(matrix, [Part(len(matrix), len(matrix))])
                    pieces += pieces_of([f"{owner}lora_{letter}.weight"], sums)
    return pieces


def parts_of(layer: Any) -> list[Part]:
    """Return the checkpoint's place of this worker's rows of a layer; [] for a layer that every worker has whole.

    Workers divide the rows of each part of a layer, and those of an embedding. Where there are fewer KV heads than
    workers, several workers have the same keys and values.
    """
    rank = getattr(layer, "tp_rank", 0)
    size = getattr(layer, "tp_size", 1)
    if hasattr(
        layer, "shard_indices"
    ):  # an embedding, with rows of zeros behind the vocabulary
        rows = layer.num_embeddings_per_partition
        return [Part(rows, layer.num_embeddings_padded, rank * rows)]
    rows_of_parts = list(getattr(layer, "output_partition_sizes", ()))
    if size == 1 or _divides_columns(layer):
        return [Part(rows, rows) for rows in rows_of_parts]
    copies = [1] * len(rows_of_parts)
    if (replicas := getattr(layer, "num_kv_head_replicas", 1)) > 1:
        copies[1:] = [replicas] * (len(copies) - 1)
    return [
        Part(rows, rows * size // same, rank // same * rows)
        for rows, same in zip(rows_of_parts, copies, strict=True)
    ]


def column_shard_of(layer: Any, leaf: str) -> int:
    """Return which column shard this worker has, of a layer whose columns the workers divide; else 0."""
    return int(layer.tp_rank) if leaf == "weight" and _divides_columns(layer) else 0


def _divides_columns(layer: Any) -> bool:
    # A tower's convolution has neither this attribute nor `tp_rank`.
    size = getattr(layer, "input_size_per_partition", None)
    return size is not None and size != layer.input_size


def saved_names(name: str, model: Any) -> list[str]:
    """Return a parameter's names in the checkpoints that vLLM knows of its model, by the model's own table."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    beginnings = {} if mapper is None else mapper.orig_to_new_prefix
    return [name] + [
        saved + name.removeprefix(loaded)
        for saved, loaded in beginnings.items()
        if loaded is not None and name.startswith(loaded)
    ]


def checkpoint_names(name: str, fused_parts: dict[str, list[str]]) -> list[str]:
    """Return `a.q_proj.weight`, `a.k_proj.weight` and `a.v_proj.weight` for `a.qkv_proj.weight`."""
    *owner, module, leaf = name.replace(".base_layer.", ".").split(".")
    return [".".join([*owner, part, leaf]) for part in fused_parts.get(module, [module])]


def record_packed_sums() -> None:
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_record(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if not weight.is_meta:  # of a convolution too, which is packed in place
            PACKED_SUMS[layer] = part_sums(weight, parts_of(layer))
        pack(layer, remove_weight=remove_weight)

    utils.dispatch_cpu_unquantized_gemm = pack_and_record


def pack_experts() -> None:
    """Note the experts' sums before vLLM reorders them, and pack a CPU's copies at every load: vLLM does at the first."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    method = module.UnquantizedFusedMoEMethod
    process = method.process_weights_after_loading

    def process_and_record(self: Any, layer: Any) -> None:
        EXPERTS[layer] = expert_pieces(layer)
        is_first = self.moe_kernel is None
        process(self, layer)
        if current_platform.is_cpu() and not is_first:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method.process_weights_after_loading = process_and_record


def expert_pieces(layer: Any) -> list[Piece]:
    """Return the pieces of this worker's experts, by the names that vLLM loads them from.

    Workers divide the rows of the gates and of the way up, and the columns of the way down, or the experts.
    """
    config = layer.moe_config
    rows = config.intermediate_size_per_partition_unpadded
    columns = config.hidden_dim_unpadded
    rank = config.tp_rank
    pieces: list[Piece] = []
    for _, name, number, shard in layer.get_expert_mapping():
        place = layer._map_global_expert_id_to_local_expert_id(number)
        if place < 0:  # another worker's
            continue
        if shard == "w2":
            matrix = layer.w2_weight[place, :columns, :rows]
            part = Part(columns, columns)
        else:
            matrix = layer.w13_weight[place].chunk(2)[shard == "w3"][:rows, :columns]
            part = Part(rows, rows * config.tp_size, rank * rows)
        names = [f"{layer.layer_name.removesuffix('experts')}{name}weight"]
        column_shard = rank if shard == "w2" else 0
        pieces += pieces_of(names, [(part, tensor_sums(matrix))], column_shard=column_shard)
    return pieces


def multiply_rows_alike() -> None:
    """Give a row the same bits whatever the others are: the number of rows must not choose the kernel.

    A single row is multiplied twice, since alone it takes a vector's kernel, which rounds differently; a decoding step
    waits for the weights, not for the second row. Of two rows and more that is all, with one and two threads, but for
    bfloat16 with AMX: there oneDNN sums in another order up to some 36 rows. So an engine that must be `REPEATABLE`
    multiplies blocks of 16 rows there.
    """
    from vllm.model_executor.layers import utils

    stock = utils.cpu_unquantized_gemm
    in_blocks = os.environ.get(REPEATABLE) == "1" and torch.cpu._is_amx_tile_supported()

    def multiply(
        layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        if in_blocks and x.dtype == torch.bfloat16:
            padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
            made = torch.cat(
                [stock(layer, block, weight, bias) for block in padded.split(_BLOCK)]
            )[: len(rows)]
        elif len(rows) == 1:
            made = stock(layer, rows.repeat(2, 1), weight, bias)[:1]
        else:
            return stock(layer, x, weight, bias)
        return made.reshape(*x.shape[:-1], made.shape[-1])

    utils.cpu_unquantized_gemm = multiply


def use_faster_sampler() -> None:
    """Patch vLLM's CPU sampler; must come before the engine's model runner is built.

    Every sampled token gets the rank 0: nobody reads it, and counting is a pass over all logits.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    TopKTopPSampler.forward_cpu = _sample
    sampler.batched_count_greater_than = lambda logprobs, _: torch.zeros(
        len(logprobs), dtype=torch.int64
    )


def _sample(
    self: Any, logits: Any, generators: Mapping[int, Any], k: Any, p: Any
) -> tuple[Any, Any]:
    """Instead of `TopKTopPSampler.forward_cpu`: token ids `[B]`, and what the logprobs mode wants, `[B, V]` or None."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    returned = None
    if self.logprobs_mode == "processed_logprobs":
        returned = logits.log_softmax(dim=-1, dtype=torch.float32)
    # A request without a seed has no generator; the process's own gives its number.
    numbers = [
        torch.rand(1, generator=generators.get(row), dtype=torch.float64)
        for row in range(len(logits))
    ]
    return draw_tokens(
        logits.softmax(dim=-1, dtype=torch.float32), torch.stack(numbers)
    ), returned


def draw_tokens(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return one token a row, `[B]`, of `probabilities` `[B, V]`, by `uniform` numbers in [0, 1), `[B, 1]`.

    It is the first token at which the sum of the probabilities so far passes the number's share of the whole sum.
    """
    sums = probabilities.cumsum(dim=-1)
    # A little less than the sum, so that rounding does not reach its end.
    wanted = uniform * sums[:, -1:] * (1 - 2**-23)
    return torch.searchsorted(sums, wanted.to(sums.dtype), right=True).flatten()


def use_norms_in_c() -> None:
    """Let the norms between layers take vLLM's C kernel, which vLLM keeps for GPUs: a fifth of PyTorch's time.

    A CPU's kernel reads its rows one behind the other, so other layouts stay with PyTorch's. Must come before the
    worker, which chooses the kernels, is built.
    """
    from vllm import ir

    op = ir.ops.fused_add_rms_norm
    kernel = op.impls[_C_NORM]
    takes = kernel.supports_args
    choose = op.set_default

    def takes_packed(x: Any, x_residual: Any, *rest: Any) -> bool:
        return bool(
            x.is_contiguous() and x_residual.is_contiguous() and takes(x, x_residual, *rest)
        )

    kernel.supported = True
    kernel.supports_args = takes_packed
    op.set_default = lambda priority: choose([_C_NORM, *priority])


def sample_drafted_positions() -> None:
    """vLLM expands temperature, top-k and top-p to the drafted positions with a kernel of Triton's, whose stand-in on a
    CPU leaves the numbers uninitialised: everything but temperature 0 would be sampled wrongly."""
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(replaced, counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def rotate_single_heads() -> None:
    """Let PyTorch rotate queries of several heads in three dimensions, as latent attention has them.

    vLLM's kernel for CPUs steps from token to token by the length of a head, and rotates others.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    in_kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: Any, query: torch.Tensor, key: Any = None) -> Any:
        rotate_query = in_kernel if query.dim() < 3 else type(self).forward_native
        return rotate_query(self, positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


dump_stacks_on_signal()
pack_experts()
if current_platform.is_cpu():
    rotate_single_heads()
    sample_drafted_positions()
    use_faster_sampler()
    use_norms_in_c()
    record_packed_sums()
    multiply_rows_alike()
