"""Fuzz all code that reads untrusted input, and print the results.

python -m tests.fuzz --runs N [--target NAME ...] [--seconds N] [--seed N] [--out DIR]     (pip install -e '.[fuzz]')
python -m tests.fuzz --again FILE      repeat the inputs of an earlier failure

Each target runs in its own process, in which atheris (coverage-guided fuzzing) creates inputs that reach new code. If
an input makes the target fail, the process writes a file with which the failure can be reproduced, and exits with
status 1. An input that takes more than 10 s also counts as a failure, and so does memory use that grows by more than 64
MiB.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz import targets
from tests.fuzz.covered import covered

MAY_GROW_MIB = 64.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz the code that reads untrusted input."
    )
    parser.add_argument(
        "--runs", type=int, default=100_000, help="number of inputs of all targets (default 100000)"
    )
    parser.add_argument("--target", nargs="+", choices=list(targets.SHARE), default=list(targets.SHARE))
    parser.add_argument("--seconds", type=int, default=0, help="time limit of each target (default 0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fuzz"), help="corpus and findings (default runs/fuzz)"
    )
    parser.add_argument("--again", type=Path, metavar="FILE", help="repeat the inputs of a finding")
    options = parser.parse_args()
    if options.again:
        return again(options.again)
    options.out.mkdir(parents=True, exist_ok=True)
    whole = sum(targets.SHARE[name] for name in options.target)
    print("| target | inputs | frames | minutes | slowest, s | lines reached | RSS, MiB | after | found |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    found = False
    for name in options.target:
        runs = round(options.runs * targets.SHARE[name] / whole)
        found |= _fuzz(name, runs, options.seconds, options.seed, options.out)
    return int(found)


def _fuzz(name: str, runs: int, seconds: int, seed: int, out: Path) -> bool:
    for old in (out / f"{name}.json", out / f"{name}.found"):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.guided", name]
    command += ["--runs", str(runs), "--seconds", str(seconds), "--seed", str(seed), "--out", str(out)]
    with (out / f"{name}.log").open("wb") as log:
        status = subprocess.call(command, stdout=log, stderr=log)
    told = {"inputs": 0, "frames": 0, "seconds": 0.0, "slowest_s": 0.0, "early_mib": 0.0, "late_mib": 0.0}
    if (out / f"{name}.json").exists():
        told = json.loads((out / f"{name}.json").read_text())
    grew = told["late_mib"] - told["early_mib"] > MAY_GROW_MIB
    problem = f"exit {status}, see {out / name}.log" if status else "growth" if grew else "nothing"
    print(
        f"| {name} | {told['inputs']:,} | {told['frames']:,} | {told['seconds'] / 60:.1f} | {told['slowest_s']:.2f} "
        f"| {_lines(name, out)} | {told['early_mib']:.0f} | {told['late_mib']:.0f} | {problem} |",
        flush=True,
    )
    return bool(status) or grew


def _lines(name: str, out: Path) -> str:
    try:
        files = covered(name, out / f"corpus-{name}").values()
    except Exception as error:  # noqa: BLE001 - an input that breaks the target is a finding
        return repr(error)[:40]
    reached, lines = (sum(len(file[which]) for file in files) for which in (0, 1))
    return f"{reached} of {lines}"


def again(path: Path) -> int:
    """Run the inputs of an earlier failure again; the error appears as a normal traceback."""
    target, data, place = targets.TARGETS[path.stem](), path.read_bytes(), 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4])
        began = time.perf_counter()
        target.feed(data[place + 4 : place + 4 + size])
        took_s = time.perf_counter() - began
        if took_s > 1:
            print(f"an input of {size} bytes took {took_s:.1f} s")
        place += 4 + size
    target.close()
    print("nothing happened")
    return 0


if __name__ == "__main__":
    sys.exit(main())
