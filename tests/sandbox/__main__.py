"""`python -m tests.sandbox --json scorecard.json`: the whole catalogue, at every level and with all rights.

Needs root, to take rights away; as a user, only a user's own are tried. A line is `passed/total`: of the attempts that
get through without a sandbox, how many are stopped within it. Honest work runs first in each combination.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.sandbox.probes import PROBES, RIGHTS
from tests.sandbox.targets import CANARY

ROOT = Path(__file__).resolve().parents[2]
_WITHIN_S = 1800.0


def run_trial(
    rights: str, *more: str, levels: str = "namespaces,landlock", where: str = "worker,program"
) -> list[dict]:
    """Return the lines of `trial`, run with these rights and `more` options; RuntimeError where it fails."""
    line = [sys.executable, "-m", "tests.sandbox.rights", rights]
    line += [
        sys.executable,
        "-m",
        "tests.sandbox.trial",
        "--rights",
        rights,
        "--levels",
        levels,
        "--where",
        where,
        *more,
    ]
    environment = {**os.environ, "TOKEN": CANARY, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_WITHIN_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{rights}: {done.stderr[-4000:]}")
    return [
        json.loads(output_line)
        for output_line in done.stdout.splitlines()
        if output_line.startswith("{")
    ]


def score(lines: Iterable[dict]) -> dict[tuple[str, str, str], tuple[int, int, list[str]]]:
    """Count for each combination how many were stopped, how many a control proves, and which got through."""
    scores: dict[tuple[str, str, str], tuple[int, int, list[str]]] = {}
    for line in lines:
        if line.get("control"):
            key = (line["rights"], line["level"], line["where"])
            passed, total, through = scores.get(key, (0, 0, []))
            through = [*through, line["probe"]] if line["through"] else through
            scores[key] = (passed + (not line["through"]), total + 1, through)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox")
    parser.add_argument(
        "--rights", default=",".join(RIGHTS if os.geteuid() == 0 else RIGHTS[1::2])
    )
    parser.add_argument("--where", default="worker,program")
    parser.add_argument("--json", type=Path, help="write every attempt here")
    parser.add_argument("--dry-run", action="store_true", help="say what would be tried")
    options = parser.parse_args()
    if options.dry_run:
        print(f"{len(PROBES)} probes with the rights of {options.rights}. Nothing was started.")
        return
    lines = []
    for rights in options.rights.split(","):
        done = run_trial(rights, where=options.where)
        lines += done
        for line in done:
            if "refused" in line:
                print(f"{rights:20} {line['level']:11} refused: {line['refused']}", flush=True)
        for (_, level, where), (passed, total, through) in score(done).items():
            print(
                f"{rights:20} {level:11} {where:8} {passed}/{total}  {'; '.join(through)}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
