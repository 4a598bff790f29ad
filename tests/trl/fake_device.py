"""Code of a run on a device that is not there: tensors without values, which know on which device they are.

    python tests/trl/fake_device.py CASE

An operation between tensors of two devices raises, as it would on a GPU. The device is not called `cuda`, because a CPU
build of torch cannot slice a tensor of that name. It is registered for the whole process, so each case has its own.
"""

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, LlamaConfig

from ycore.engine import weights
from ycore.engine.weight_proof import tensor_sums
from ycore.trl import forward, packing
from ycore.trl.offload import Offload

NAME, DEVICE = "pretended", "pretended:0"
PROMPTS, COMPLETIONS = (
    [tuple(range(9)), tuple(range(9)), (3, 4)],
    [(1, 2, 3), (4, 5, 6, 7), (8,)],
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def on_the_device() -> Any:
    config = LlamaConfig(**SIZES, vocab_size=90, num_hidden_layers=2)
    with unset_fake_temporarily():
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(
                    empty, requires_grad=value.requires_grad
                )
        for name, value in module._buffers.items():
            module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
    return model


def score() -> None:
    """Forward and backward of packed rows, with a mask for the short block; the row is planned on the host."""
    model = on_the_device()
    packing.use_segments(model.get_base_model())
    forward.add_compact_head(model.get_base_model(), temperature=1.0)
    forward._unpad = lambda *_: (PROMPTS, COMPLETIONS, [0, 4, 8])  # type: ignore[assignment]  # reads values
    forward.score_tokens = untiled  # type: ignore[assignment]  # splits by a number that is a value
    ids = torch.zeros(3, 13, dtype=torch.long, device=DEVICE)
    rows = forward.PaddedRows(ids, torch.ones_like(ids), 4)
    logps, entropies = forward.packed_scores(model, rows, path="segments")
    assert str(logps.device) == str(entropies.device) == DEVICE
    logps.sum().backward()
    assert {
        str(parameter.grad.device)
        for parameter in model.parameters()
        if parameter.grad is not None
    } == {DEVICE}


def untiled(hidden: Any, head: Any, targets: Any, **_: Any) -> tuple[Any, Any]:
    log_p = (hidden @ head.weight.T).float().log_softmax(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), log_p.detach().sum(-1)


def score_with_a_mask_left_on_the_host() -> None:
    def made(path: str, blocks: Any, device: torch.device) -> dict[str, Any]:
        left = packing.Segments(list(blocks), masks={0: packing.block_mask(blocks[0])})
        return {"attention_mask": torch.ones(1, 1, 1, 1, device=device), "segments": left}

    forward.attention_inputs = made
    score()


def merge() -> None:
    """Adapters are merged, and weights cast, before anything leaves the device: two bytes a number."""
    model = on_the_device()
    exported = dict(weights.engine_weights(model, dtype=torch.bfloat16))
    assert {str(weight.device) for weight in exported.values()} == {DEVICE}
    numbers = sum(
        value.numel() for name, value in model.named_parameters() if "lora_" not in name
    )
    assert sum(weight.nbytes for weight in exported.values()) == 2 * numbers
    for weight in exported.values():
        try:
            tensor_sums(weight)
        except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
            continue  # the sum exists, without a value
        raise AssertionError("a sum without a value was given")


def merge_with_adapters_left_on_the_host() -> None:
    moved = weights._unsharded
    weights._unsharded = lambda weight: (
        weight.cpu() if min(weight.shape) == 4 else moved(weight)
    )  # type: ignore[assignment]
    merge()


def offload(*, comes_back: bool = True) -> None:
    """The optimizer's moments leave the device for a round, and are there again for the next step."""
    parameter = torch.nn.Parameter(torch.empty(4, 4, device=DEVICE))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    moments = ("exp_avg", "exp_avg_sq")
    restore = Offload("optimizer", of=NAME).move_moments(optimizer)
    assert {str(optimizer.state[parameter][name].device) for name in moments} == {"cpu"}
    if comes_back:
        restore()
        assert {str(optimizer.state[parameter][name].device) for name in moments} == {DEVICE}
    optimizer.step()


def offload_that_does_not_come_back() -> None:
    offload(comes_back=False)


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(NAME)
    for case in sys.argv[1:]:
        with FakeTensorMode(shape_env=ShapeEnv()):
            globals()[case]()
