"""Row: what the protection takes of a step, with a real engine and a real model.

It cannot be switched off in the product, and should not be. So its parts are timed where they are called, in a copy of
the package: what is compared is their sum and the whole of the steps. A part inside the engine counts as if the trainer
had waited for all of it, which it does.

Not here: the stopwatch (`stopwatch`).
"""

from dataclasses import replace

from ycore.errors import RunError
from ycore.run.metrics import read_metrics
from ycore.selftest.bench import Bench, Row
from ycore.selftest.copies import Edit, Patch, copy_package
from ycore.selftest.runs import Run
from ycore.selftest.stopwatch import VARIABLE, read_times

MOST = 0.03
"""The share of step time that protection may take."""

_STEPS = 10
_LIMIT_S = 1800.0
_IMPORT = "\nfrom ycore.selftest.stopwatch import timed\n"


def _timed(part: str, file: str, anchor: str, function: str, *, indent: str = "") -> Patch:
    """Decorate `function`; `anchor` is an import of the file, behind which the stopwatch is imported."""
    return Patch(
        f"time {part}",
        (
            Edit(file, f"\n{anchor}\n", f"\n{anchor}{_IMPORT}"),
            Edit(file, f"\n{indent}def {function}(", f'\n{indent}@timed("{part}")\n{indent}def {function}('),
        ),
    )


PARTS: tuple[Patch, ...] = (
    _timed("journal", "ycore/round/journal.py", "from ycore.round.peers import Peers", "commit", indent="    "),
    _timed("sums of the weights", "ycore/engine/weights.py", "from ycore.errors import SyncError", "byte_sum"),
    _timed("read back", "ycore/engine/vllm_extension.py", "from typing import Any", "read_back"),
    _timed(
        "flush and manifest",
        "ycore/run/checkpoints.py",
        "from ycore.errors import RunError, RunFolderError",
        "publish",
    ),
)


def cost_row(bench: Bench) -> Row:
    """Steps of the quickstart, whose model is a real one; the share of its step time that the parts took."""
    package = copy_package(bench.place / "timed-package", PARTS)
    times = bench.place / "times.log"
    setting = replace(bench.setting, package=package, environment={VARIABLE: str(times)})
    output = bench.place / "cost"
    words = ["grpo", "--recipe", "quickstart", "--steps", str(_STEPS), "--output", str(output)]
    run = Run(setting, words, output)
    try:
        status = run.wait(timeout_s=_LIMIT_S)
    finally:
        run.end()
    if status != 0:
        raise RunError(f"the quickstart ended with {status}: {run.tail(1)} (see {run.log})")
    seconds = read_times(times)
    steps = sum(row["ycore/time/step"] for row in read_metrics(run.folder.metrics))
    share = sum(seconds.values()) / steps
    missing = [patch.name for patch in PARTS if patch.name.removeprefix("time ") not in seconds]
    told = ", ".join(f"{part} {100 * took / steps:.2f} %" for part, took in seconds.items())
    is_good = share <= MOST and not missing
    return Row(
        "cost",
        f"protection takes {100 * share:.2f} % of step time, at most {100 * MOST:.0f} % ({told})",
        int(is_good),
        1,
        failures=() if is_good else (f"{share:.4f} of step time; not met at all: {missing}",),
        more={"share": share, "seconds": seconds, "step_seconds": steps},
    )
