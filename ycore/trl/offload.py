"""The optimizer's state out of the device's memory while engines have it, and back before the next step.

DeepSpeed moves it by itself (`offload_states`) under ZeRO-1 and ZeRO-2, and under ZeRO-3 with its own FusedAdam alone.
With another optimizer under ZeRO-3, and without DeepSpeed, the moments are moved here, tensor by tensor, as torch keeps
them. Under DeepSpeed without a ZeRO stage that can, they stay: its own tensors look into them.

The calls were held against DeepSpeed 0.19.8's source; none of this was ever run on a device.

Not here: when engines have the device (`controller.dispatch`), and their own sleep (`roles.sleeping`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ycore.errors import Interrupted

Back = Callable[[], object]


@contextmanager
def optimizer_away(optimizer: Any, engine: Any = None) -> Iterator[None]:
    """Within it the state of `optimizer` is in host memory, and the device's cache is given back.

    Args:
        optimizer: the trainer's, wrapped by accelerate or not; None before there is one.
        engine: DeepSpeed's engine where it trains, which has the optimizer's state then.

    It comes back unless the work within failed: after an error nothing is saved, and there may be no room.
    """
    back = _take_away(optimizer, engine)
    torch.cuda.empty_cache()  # also of activations; nothing where there is no device
    try:
        yield
    except Interrupted:
        back()  # a checkpoint is saved with it
        raise
    back()


def _take_away(optimizer: Any, engine: Any) -> Back:
    if engine is not None:
        if deepspeed_can(engine):
            engine.offload_states(include=_states())
            return lambda: engine.reload_states()
        optimizer = engine.optimizer if engine.zero_optimization_stage() == 3 else None
    inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper, or of ZeRO's
    return (lambda: None) if inner is None else move_moments(inner)


def deepspeed_can(engine: Any) -> bool:
    """Whether DeepSpeed moves the optimizer's state itself; it asserts where it does not, and leaves what is off."""
    offloaded = engine.zero_offload_param()
    if engine.zero_use_cpu_optimizer() or (offloaded is not None and offloaded.device.value != "none"):
        return False
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return bool(type(engine.optimizer.optimizer).__name__ == "FusedAdam")
    return stage in (1, 2) and hasattr(engine.optimizer, "offload_states")


def move_moments(optimizer: torch.optim.Optimizer, *, of: str = "cuda") -> Back:
    """Copy every tensor of the optimizer's state that is on a device of this type to the host; call to put it back.

    Only the state's own entries change: parameters and their groups stay. What an optimizer pages by itself, it keeps.
    """
    moved: list[tuple[dict[str, Any], str, torch.device]] = []
    for state in optimizer.state.values():
        for key, value in state.items():
            pages_itself = getattr(value, "is_paged", False)  # bitsandbytes' paged optimizers
            if isinstance(value, torch.Tensor) and value.device.type == of and not pages_itself:
                moved.append((state, key, value.device))
                state[key] = value.to("cpu", copy=True)

    def back() -> None:
        for state, key, device in moved:
            state[key] = state[key].to(device)

    return back


def _states() -> list[Any]:
    """Moments and master weights, by DeepSpeed's names. Gradients stay: a round may come while a step gathers them."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
