"""Take the optimizer's state off the device while engines use it, and put it back before the next step.

DeepSpeed moves it itself (`offload_states`) under ZeRO-1 and ZeRO-2, and under ZeRO-3 only with its own FusedAdam. With
another optimizer under ZeRO-3, and without DeepSpeed, the moments are moved here, tensor by tensor. Under DeepSpeed
without ZeRO they stay: its own tensors are views into them.

The calls were checked against the source of DeepSpeed 0.19.8; none was ever run on a device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ycore.errors import Interrupted

Restore = Callable[[], object]


@contextmanager
def optimizer_away(optimizer: Any, engine: Any = None) -> Iterator[None]:
    """Keep the optimizer's state in host memory, and give the device's cache back.

    The state comes back unless the work fails: after an error nothing is saved, and there may be no room.

    Args:
        optimizer: the trainer's, wrapped by accelerate or not; None before there is one.
        engine: DeepSpeed's engine, which then holds the optimizer's state.
    """
    restore = _take_away(optimizer, engine)
    torch.cuda.empty_cache()  # of activations too; does nothing without a device
    try:
        yield
    except Interrupted:
        restore()  # the checkpoint that follows needs it
        raise
    restore()


def _take_away(optimizer: Any, engine: Any) -> Restore:
    if engine is not None:
        if deepspeed_can(engine):
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

            # Moments and master weights. Gradients stay: a round may come while a step accumulates them.
            engine.offload_states(include=[State.optim_states, State.hp_params])
            return lambda: engine.reload_states()
        optimizer = engine.optimizer if engine.zero_optimization_stage() == 3 else None
    inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper, or of ZeRO's
    return (lambda: None) if inner is None else move_moments(inner)


def deepspeed_can(engine: Any) -> bool:
    """Whether DeepSpeed moves the optimizer's state itself; elsewhere its call asserts."""
    offloaded = engine.zero_offload_param()
    if engine.zero_use_cpu_optimizer() or (offloaded is not None and offloaded.device.value != "none"):
        return False
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return bool(type(engine.optimizer.optimizer).__name__ == "FusedAdam")
    return stage in (1, 2) and hasattr(engine.optimizer, "offload_states")


def move_moments(optimizer: torch.optim.Optimizer, *, of: str = "cuda") -> Restore:
    """Move every tensor of the optimizer's state on devices of type `of` to the host; call the result to undo it.

    Parameters and their groups stay, and so does what bitsandbytes' optimizers page themselves.
    """
    moved: list[tuple[dict[str, Any], str, torch.device]] = []
    for state in optimizer.state.values():
        for key, value in state.items():
            pages_itself = getattr(value, "is_paged", False)
            if isinstance(value, torch.Tensor) and value.device.type == of and not pages_itself:
                moved.append((state, key, value.device))
                state[key] = value.to("cpu", copy=True)

    def restore() -> None:
        for state, key, device in moved:
            state[key] = state[key].to(device)

    return restore
