"""Row: seeded defects in copies of the package, and how many of them the scorecard's own comparisons find.

Every defect goes through the same battery, in the same order, until a test finds it. The battery knows nothing of the
defect. The unchanged package goes through all of it first, and must pass.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.bench import Bench, Row
from tests.chaos.moments import Moment
from tests.chaos.patches import MUTATIONS, Patch, copy_package
from tests.chaos.rows_calls import account_trial, calls_trial, stale_trial
from tests.chaos.rows_files import damage_checkpoint, damage_round, killed_in_save, stopped_run
from tests.chaos.runs import Setting
from tests.chaos.trial import Oracle, Outcome, kill, trial
from tests.chaos.witnesses import FLUSHES_VARIABLE, read_flushes
from ycore.errors import RunError


@dataclass(frozen=True, slots=True)
class Suspect:
    """A package to look at, and where its runs go."""

    name: str
    oracle: Oracle
    setting: Setting
    seed: int

    @property
    def steps(self) -> int:
        return self.oracle.job.steps


def _killed_trainer(suspect: Suspect) -> str | None:
    """Kill the trainer in the middle of a round behind a checkpoint, and in the training behind that."""
    for share in (0.3, 0.9):
        moment = Moment(suspect.steps - 3, share)
        guilt = _guilt(
            trial(
                f"trainer-{share}",
                suspect.oracle,
                moment,
                kill("trainer"),
                setting=suspect.setting,
            )
        )
        if guilt:
            return guilt
    return None


def _killed_launcher(suspect: Suspect) -> str | None:
    moment = Moment(suspect.steps - 3, 0.5)
    return _guilt(
        trial("launcher", suspect.oracle, moment, kill("launcher"), setting=suspect.setting)
    )


def _flushes(suspect: Suspect) -> str | None:
    _, unflushed = read_flushes(Path(suspect.setting.environment[FLUSHES_VARIABLE]))
    return unflushed[0] if unflushed else None


def _damaged(suspect: Suspect) -> str | None:
    base = stopped_run(suspect.oracle, suspect.setting, "stopped", after=suspect.steps - 2)
    for file in ("adapter_model.safetensors", "optimizer.pt"):
        guilt = _guilt(
            damage_checkpoint(suspect.oracle, suspect.setting, base, file, "flipped")
        )
        if guilt:
            return guilt
    return _guilt(damage_round(suspect.oracle, suspect.setting, base, "flipped"))


def _killed_in_save(suspect: Suspect) -> str | None:
    """Kill the trainer as near to the save's beginning as a kill comes: a save is short, and the kill must be in it."""
    for number in range(3):
        name, step = f"save-{number}", 2 * suspect.oracle.job.checkpoint_every
        outcome = killed_in_save(suspect.oracle, suspect.setting, name, step=step, share=0.0)
        if not (outcome.difference.is_none and outcome.is_clean):
            return str(outcome)
    return None


def _calls(suspect: Suspect) -> str | None:
    return _guilt(calls_trial(suspect.oracle, suspect.setting, "failing", suspect.seed))


def _stale(suspect: Suspect) -> str | None:
    return _guilt(stale_trial(suspect.oracle, suspect.setting, 0, 3))


def _account(suspect: Suspect) -> str | None:
    for steps in (3, 5):
        moment = Moment(suspect.steps - steps, 0.3)
        guilt = _guilt(
            account_trial(suspect.oracle, suspect.setting, f"account-{steps}", moment)
        )
        if guilt:
            return guilt
    return None


BATTERY: dict[str, Callable[[Suspect], str | None]] = {
    "kill the trainer": _killed_trainer,
    "order of flushes": _flushes,
    "kill the launcher": _killed_launcher,
    "engine without its weights": _stale,
    "calls that fail": _calls,
    "damaged files": _damaged,
    "account of prompts": _account,
    "kill in a save": _killed_in_save,
}


def mutation_row(bench: Bench) -> Row:
    """Try every defect, and first the package without one."""
    oracle = bench.oracle()
    began = time.monotonic()
    suspects = [_suspect(bench, oracle, patch) for patch in (None, *MUTATIONS)]
    found_by = list(bench.pool.map(lambda suspect: _examine(bench, suspect), suspects))
    guilty, caught = (
        found_by[0],
        {patch.name: guilt for patch, guilt in zip(MUTATIONS, found_by[1:], strict=True)},
    )
    missed = [f"{name}: not noticed" for name, guilt in caught.items() if guilt is None]
    accused = [f"the package without a defect: {guilty}"] if guilty else []
    return Row(
        "mutations",
        "seeded defects that the scorecard's own comparisons find",
        0 if guilty else sum(guilt is not None for guilt in caught.values()),
        len(MUTATIONS),
        failures=(*accused, *missed),
        more={"found_by": caught, "seconds": round(time.monotonic() - began)},
    )


def _suspect(bench: Bench, oracle: Oracle, patch: Patch | None) -> Suspect:
    """Make the suspect; RunError where the patch does not apply: then the whole row fails, before anything is run."""
    name = "no-defect" if patch is None else re.sub(r"[^a-z]+", "-", patch.name)
    place = bench.place / f"mutant-{name}"
    package = copy_package(place / "package", () if patch is None else (patch,))
    environment = {**bench.setting.environment, FLUSHES_VARIABLE: str(place / "flushes.log")}
    return Suspect(
        name,
        oracle,
        replace(bench.setting, place=place, package=package, environment=environment),
        bench.seed,
    )


def _examine(bench: Bench, suspect: Suspect) -> str | None:
    """Say by what it was found guilty; None where nothing was found."""
    for test, look in BATTERY.items():
        try:
            guilt = look(suspect)
        except (
            RunError
        ) as error:  # a run that the battery needs could not be made with this package
            guilt = str(error)
        if guilt:
            bench.say(f"  {suspect.name}: found by {test}: {guilt}")
            return f"{test}: {guilt}"
    bench.say(f"  {suspect.name}: nothing found")
    return None


def _guilt(outcome: Outcome) -> str | None:
    return None if outcome.passes else str(outcome)
