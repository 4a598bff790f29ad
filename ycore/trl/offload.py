"""Take the optimizer's state and frozen weights off the device while engines use it, and put them back after.

Host memory is pinned, so that copies run at the link's speed, and is kept from round to round.

DeepSpeed moves it itself (`offload_states`) under ZeRO-1 and ZeRO-2, and under ZeRO-3 only with its own FusedAdam. With
another optimizer under ZeRO-3, and without DeepSpeed, the moments are moved here, tensor by tensor. Under DeepSpeed
without ZeRO they stay: its own tensors are views into them.

The calls were checked against the source of DeepSpeed 0.19.8; none was ever run on a device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ycore.errors import Interrupted

Restore = Callable[[], object]


@dataclass(eq=False)
class Offload:
    """Keeps a part of a trainer's state in host memory while engines use its device.

    Args:
        level: "none" only gives the device's cache back; "weights" are the optimizer's state and frozen weights.
        models: those of which the frozen weights may leave.
        of: the type of the devices that are left.
    """

    level: str
    models: Sequence[nn.Module] = ()
    _: KW_ONLY
    of: str = "cuda"

    def __post_init__(self) -> None:
        self._hosts: dict[Any, Tensor] = {}

    @contextmanager
    def away(self, optimizer: Any, engine: Any = None) -> Iterator[None]:
        """Keep it in host memory meanwhile. It comes back unless the work fails: then nothing is saved.

        Args:
            optimizer: the trainer's, wrapped by accelerate or not; None before there is one.
            engine: DeepSpeed's engine, which then holds the optimizer's state.
        """
        restores = [] if self.level == "none" else [self._take_away(optimizer, engine)]
        if self.level == "weights":
            restores.append(self._freeze_away())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies run behind the host's back
            torch.cuda.empty_cache()  # of activations too
        try:
            yield
        except Interrupted:
            for restore in restores:
                restore()  # the checkpoint that follows needs it
            raise
        for restore in restores:
            restore()

    def _take_away(self, optimizer: Any, engine: Any) -> Restore:
        if engine is not None:
            if deepspeed_can(engine):
                from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

                # Moments and master weights. Gradients stay: a round may come while a step accumulates them.
                engine.offload_states(include=[State.optim_states, State.hp_params])
                return lambda: engine.reload_states()
            optimizer = engine.optimizer if engine.zero_optimization_stage() == 3 else None
        inner = getattr(
            optimizer, "optimizer", optimizer
        )  # of accelerate's wrapper, or of ZeRO's
        return (lambda: None) if inner is None else self.move_moments(inner)

    def move_moments(self, optimizer: torch.optim.Optimizer) -> Restore:
        """Move every tensor of the optimizer's state to the host; call the result to undo it.

        Parameters and their groups stay, and so does what bitsandbytes' optimizers page themselves.
        """
        moved: list[tuple[dict[str, Any], str, torch.device]] = []
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                pages_itself = getattr(value, "is_paged", False)
                if (
                    isinstance(value, Tensor)
                    and value.device.type == self.of
                    and not pages_itself
                ):
                    moved.append((state, key, value.device))
                    state[key] = self._on_host((parameter, key), value)

        def restore() -> None:
            for state, key, device in moved:
                state[key] = state[key].to(device, non_blocking=True, copy=True)

        return restore

    def _freeze_away(self) -> Restore:
        """Frozen weights never change, so their copies on the host are made once."""
        moved: list[tuple[nn.Parameter, torch.device]] = []
        for parameter in (weight for model in self.models for weight in model.parameters()):
            if (
                parameter.requires_grad
                or parameter.device.type != self.of
                or hasattr(parameter, "ds_id")
            ):
                continue
            if parameter not in self._hosts:
                self._on_host(parameter, parameter.data)
            moved.append((parameter, parameter.device))
            parameter.data = self._hosts[parameter]

        def restore() -> None:
            for parameter, device in moved:
                parameter.data = parameter.data.to(device, non_blocking=True, copy=True)

        return restore

    def _on_host(self, key: Any, value: Tensor) -> Tensor:
        host = self._hosts.get(key)
        if host is None or host.shape != value.shape or host.dtype != value.dtype:
            host = torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available())
            self._hosts[key] = host
        return host.copy_(value, non_blocking=True)


def deepspeed_can(engine: Any) -> bool:
    """Whether DeepSpeed moves the optimizer's state itself; elsewhere its call asserts."""
    offloaded = engine.zero_offload_param()
    if engine.zero_use_cpu_optimizer() or (
        offloaded is not None and offloaded.device.value != "none"
    ):
        return False
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return bool(type(engine.optimizer.optimizer).__name__ == "FusedAdam")
    return stage in (1, 2) and hasattr(engine.optimizer, "offload_states")
