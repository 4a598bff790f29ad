"""Every probe of the catalogue, as a reward function and as a model's program, at each level that this machine offers.

Here with the rights of whoever runs the tests, and in a container's. `python -m tests.sandbox` tries all rights.
"""

import json
import os
from functools import cache

import pytest

from tests.sandbox.__main__ import run_trial, score
from tests.sandbox.mutations import MUTATIONS, Mutation
from tests.sandbox.probes import PROBES, Probe
from ycore.sandbox import Level
from ycore.sandbox.level import level_refusal

OWN = "root" if os.geteuid() == 0 else "user"
PLACES = [
    (OWN, "namespaces", "worker"),
    (OWN, "namespaces", "program"),
    (f"{OWN} in a container", "landlock", "worker"),
]


@cache
def lines(rights: str, level: str) -> list[dict]:
    """Both uses after one round of controls."""
    if "container" not in rights and (answer := level_refusal(Level(level))) is not None:
        pytest.skip(f"{level}: {answer}")
    where = ",".join(use for *place, use in PLACES if place == [rights, level])
    return run_trial(rights, levels=level, where=where)


@cache
def attempts(rights: str, level: str, where: str) -> dict[str, dict]:
    return {
        line["probe"]: line
        for line in lines(rights, level)
        if line.get("where") == where and "probe" in line
    }


@pytest.mark.verify
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_honest_work_ran_and_the_machine_could_make_every_attempt(
    place: tuple[str, str, str],
) -> None:
    tried_here = attempts(*place)
    assert tried_here.keys() == {probe.name for probe in PROBES}
    controls = next(line["controls"] for line in lines(*place[:2]) if "controls" in line)
    assert [
        probe.name
        for probe in PROBES
        if probe.must_get_through(place[0]) and not controls[probe.name]
    ] == []
    assert sum(controls.values()) >= 100


@pytest.mark.verify
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_it_is_stopped(probe: Probe, place: tuple[str, str, str]) -> None:
    attempt = attempts(*place)[probe.name]
    if not attempt["control"]:
        pytest.skip("does not get through without a sandbox either")
    assert not attempt["through"] or place[1] in probe.known, json.dumps(attempt)


@pytest.mark.verify
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_defect_is_found(mutation: Mutation) -> None:
    rights = mutation.rights or OWN
    if OWN == "user" and rights == "root":
        pytest.skip("needs root")
    if (answer := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(f"namespaces: {answer}")
    broken = run_trial(
        rights, "--mutation", mutation.name, "--no-control", levels="namespaces", where="worker"
    )
    assert [line["through"] for line in broken if "probe" in line] == [True]


def test_a_score_counts_what_a_control_proves() -> None:
    row = {"rights": "user", "level": "landlock", "where": "worker"}
    some = [
        {**row, "probe": "a", "control": True, "through": False},
        {**row, "probe": "b", "control": True, "through": True},
        {**row, "probe": "c", "control": False, "through": False},
    ]
    assert score(some) == {("user", "landlock", "worker"): (1, 2, ["b"])}
