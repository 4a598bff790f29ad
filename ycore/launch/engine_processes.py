"""Every engine of a run as a process to start: its name, role, socket, command, environment and cores.

Not here: which engines there are (`engines`, `scorers`), and starting and watching them (`launcher`, `supervise`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ycore.launch.scorers import ScorerPlan
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT
from ycore.roles.judge import judge_command
from ycore.roles.reward_model import reward_model_command
from ycore.roles.rollout import RolloutEngine, engine_command, engine_environment

_COMMANDS: dict[str, Callable[[RolloutEngine], list[str]]] = {
    ROLLOUT: engine_command,
    JUDGE: judge_command,
    REWARD_MODEL: reward_model_command,
}


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine; started again, it is the same."""

    name: str
    role: str
    socket: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    cores: tuple[int, ...] | None
    device: str | None = None
    sleeps: bool = False


def engine_processes(engines: Sequence[RolloutEngine], scorers: Sequence[ScorerPlan]) -> list[EngineProcess]:
    """The rollout engines, then the others, slot by slot within a model."""
    told = [(ROLLOUT, engine) for engine in engines]
    told += [(plan.role, engine) for plan in scorers for engine in plan.engines]
    return [
        EngineProcess(
            name=engine.name,
            role=role,
            socket=engine.socket,
            command=tuple(_COMMANDS[role](engine)),
            environment=engine_environment(engine, has_neighbours=bool(scorers)),
            cores=engine.cores,
            device=engine.device,
            sleeps=engine.sleeps,
        )
        for role, engine in told
    ]
