"""The optimizer's state away and back: on a CPU, so what is moved is copied there, and nothing is freed."""

from enum import Enum
from typing import Any

import pytest
import torch

from ycore.errors import EngineError, Interrupted
from ycore.trl.offload import Offload, deepspeed_can


def trained(
    steps: int, *, away_after: int | None = None
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Parameters after so many steps of AdamW, of which one was followed by a time away."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
        if step == away_after:
            Offload("optimizer", of="cpu").move_moments(optimizer)()
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


def test_a_step_after_a_time_away_is_the_step_that_it_would_have_been() -> None:
    stayed, _ = trained(4)
    for away_after in range(3):
        moved, _ = trained(4, away_after=away_after)
        assert all(
            torch.equal(weight, other) for weight, other in zip(stayed, moved, strict=True)
        )
    assert not torch.equal(stayed[0], trained(3)[0][0])


def test_every_tensor_of_the_state_is_another_while_away_and_has_its_dtype_and_numbers() -> (
    None
):
    _, optimizer = trained(2)
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    before = {(p, key): value for p in parameters for key, value in optimizer.state[p].items()}
    assert {key for _, key in before} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    back = Offload("optimizer", of="cpu").move_moments(optimizer)
    for (parameter, key), value in before.items():
        away = optimizer.state[parameter][key]
        assert (
            away.data_ptr() != value.data_ptr()
            and away.dtype == value.dtype
            and torch.equal(away, value)
        )
    back()
    assert all(
        torch.equal(optimizer.state[p][key], value) for (p, key), value in before.items()
    )
    assert list(optimizer.state) == parameters, (
        "the optimizer still finds its parameters' state"
    )


def test_what_is_on_no_device_or_pages_itself_stays() -> None:
    _, optimizer = trained(1)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"].is_paged = True
    kept, other = state["exp_avg"], state["exp_avg_sq"]
    Offload("optimizer").move_moments(optimizer)
    assert state["exp_avg_sq"] is other
    Offload("optimizer", of="cpu").move_moments(optimizer)
    assert state["exp_avg"] is kept and state["exp_avg_sq"] is not other


class Device(Enum):
    none = "none"
    cpu = "cpu"


class ParameterOffload:
    def __init__(self, device: Device) -> None:
        self.device = device


class FusedAdam(torch.optim.AdamW):
    """Named as DeepSpeed's own."""


class Zero:
    """The optimizer of a DeepSpeed engine, around torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def offload_states(self) -> None:
        """There, as in stages 1 to 3; the engine's is called."""


class DeepSpeedEngine:
    """Record the calls to DeepSpeed's engine."""

    def __init__(
        self,
        stage: int,
        *,
        optimizer: Any = None,
        cpu: bool = False,
        params: Device | None = None,
    ) -> None:
        self.calls: list[Any] = []
        self.optimizer = optimizer or Zero(FusedAdam([torch.nn.Parameter(torch.ones(1))]))
        self._stage, self._cpu, self._params = stage, cpu, params

    def zero_optimization_stage(self) -> int:
        return self._stage

    def zero_use_cpu_optimizer(self) -> bool:
        return self._cpu

    def zero_offload_param(self) -> ParameterOffload | None:
        return None if self._params is None else ParameterOffload(self._params)

    def offload_states(self, include: list[Any]) -> None:
        self.calls.append([state.value for state in include])

    def reload_states(self) -> None:
        self.calls.append("reload")


AWAY = ["optim_states", "hp_params"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_moves_what_it_can(stage: int) -> None:
    pytest.importorskip("deepspeed")
    engine = DeepSpeedEngine(stage, params=Device.none)
    with Offload("optimizer").away(None, engine):
        assert engine.calls == [AWAY]
    assert engine.calls == [AWAY, "reload"]


def test_deepspeed_is_not_asked_for_what_it_asserts_against() -> None:
    torchs = Zero(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
    assert not deepspeed_can(DeepSpeedEngine(3, optimizer=torchs))
    assert deepspeed_can(DeepSpeedEngine(2, optimizer=torchs))
    assert not deepspeed_can(DeepSpeedEngine(2, cpu=True))
    assert not deepspeed_can(DeepSpeedEngine(3, params=Device.cpu))
    assert not deepspeed_can(DeepSpeedEngine(0))
    assert not deepspeed_can(DeepSpeedEngine(1, optimizer=object()))


def test_under_zero3_another_optimizers_moments_are_moved_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer = trained(1)
    moved: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(
        Offload, "move_moments", lambda self, inner: lambda: moved.append(inner)
    )
    for stage, expected in ((3, [optimizer]), (1, [])):
        engine = DeepSpeedEngine(stage, optimizer=Zero(optimizer), cpu=stage == 1)
        with Offload("optimizer").away(object(), engine):
            assert moved == []
        assert moved == expected and engine.calls == []
        moved.clear()


def test_deepspeeds_source_has_what_was_read_there() -> None:
    """Its assertion about FusedAdam and its names, in the version that is installed."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.engine import DeepSpeedEngine as Real
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage2

    for name in (
        "offload_states",
        "reload_states",
        "zero_use_cpu_optimizer",
        "zero_offload_param",
    ):
        assert callable(getattr(Real, name))
    assert callable(Stage2.offload_states) and callable(Stage2.reload_states)
    assert "FusedAdam" in Stage3.offload_states.__code__.co_names


@pytest.mark.parametrize(
    ("error", "comes_back"), [(Interrupted("stopped"), True), (EngineError("lost"), False)]
)
def test_it_comes_back_for_a_checkpoint_and_not_after_an_error(
    error: Exception, comes_back: bool
) -> None:
    pytest.importorskip("deepspeed")
    engine = DeepSpeedEngine(2)
    with pytest.raises(type(error)), Offload("optimizer").away(None, engine):
        raise error
    assert engine.calls == ([AWAY, "reload"] if comes_back else [AWAY])


def test_before_there_is_an_optimizer_nothing_is_moved() -> None:
    with Offload("optimizer").away(None):
        pass


def test_frozen_weights_leave_and_come_back_and_their_copy_on_the_host_is_made_once() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2)
    )
    frozen, trained_weight = model[0].weight, model[1].weight
    before, on_device = frozen.detach().clone(), frozen.data_ptr()
    room = Offload("weights", [model], of="cpu")
    hosts = []
    for _ in range(2):
        with room.away(None):
            assert frozen.data_ptr() != on_device and torch.equal(frozen, before), (
                "a sync reads it there"
            )
            assert (
                frozen is model[0].weight
                and trained_weight.data_ptr() == model[1].weight.data_ptr()
            )
            hosts.append(frozen.data_ptr())
        assert frozen.data_ptr() != hosts[-1] and torch.equal(frozen, before)
        on_device = frozen.data_ptr()
    assert hosts[0] == hosts[1]
    with Offload("optimizer", [model], of="cpu").away(None):
        assert frozen.data_ptr() == on_device


def test_host_memory_for_the_moments_is_used_again() -> None:
    _, optimizer = trained(1)
    state, room, seen = next(iter(optimizer.state.values())), Offload("optimizer", of="cpu"), []
    for _ in range(2):
        with room.away(optimizer):
            seen.append(state["exp_avg"].data_ptr())
    assert seen[0] == seen[1]
    with Offload("none").away(optimizer):
        pass
