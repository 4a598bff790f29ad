"""`python -m tests.gpu [--device cpu] [PART ...]`: run the parts of the device check one by one and print their figures."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.gpu.check import PARTS, run_part
from ycore.errors import RunError
from ycore.launch.layout import visible_gpus


def main() -> int:
    """Exit status 0 where all that ran has passed, 1 where a part failed, 2 where there is no GPU."""
    options = make_parser().parse_args()
    if options.dry_run:
        for name, part in PARTS.items():
            print(f"{name:<12} {part.limit_s:.0f} s at most; needs a GPU: {part.needs_gpu}")
        print("Nothing was started; leave out --dry-run to begin.")
        return 0
    gpus = () if options.device == "cpu" else visible_gpus()
    if options.device == "gpu" and not gpus:
        print("the driver lists no NVIDIA GPU; add --device cpu for what a CPU can do")
        return 2
    device = gpus[0].id if gpus else None
    passed = True
    for name in options.parts or PARTS:
        if device is None and not PARTS[name].runs_on_cpu:
            print(f"not run: {name} ({PARTS[name].needs_gpu})")
            continue
        print(f"{name} ...", flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="ycore-gpu-") as folder:
                print(f"  pass: {run_part(name, Path(folder), device=device)}", flush=True)
        except RunError as problem:
            passed = False
            print(f"  FAIL: {problem}", flush=True)
            if name == "device":
                break  # the other parts would run on the CPU, and pass
    return 0 if passed else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--dry-run", action="store_true", help="list the parts, start nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
