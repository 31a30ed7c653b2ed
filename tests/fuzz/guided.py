"""Runs one target under a coverage-guided fuzzer (atheris, based on libFuzzer) in its own process.

python -m tests.fuzz.guided TARGET --runs N --seed N --out DIR
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["agents", "cockpit"]):
    from tests.fuzz import inputs, targets

RENEWED = 250  # number of inputs after which a new target object is created
HANGS_S = 10
MIB = 1 << 20


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / MIB


class Run:
    """Feeds inputs to one fuzz target and logs the progress."""

    def __init__(self, name: str, runs: int, out: Path) -> None:
        self._name, self._runs, self._out = name, runs, out
        self._target = targets.TARGETS[name]()
        self._since: list[bytes] = []  # all inputs to this target object, to reproduce a finding
        self._fed = self._count = 0
        self._slowest_s = self._early_mib = 0.0
        self._began = time.monotonic()

    def __call__(self, data: bytes) -> None:
        self._since.append(data)
        began = time.perf_counter()
        try:
            self._target.feed(data)
            self._slowest_s = max(self._slowest_s, time.perf_counter() - began)
            self._count += 1
            if len(self._since) >= RENEWED or self._count == self._runs:
                self._renew()
        except BaseException:
            path = self._out / f"{self._name}.found"
            path.write_bytes(b"".join(len(one).to_bytes(4) + one for one in self._since))
            raise

    def _renew(self) -> None:
        self._fed += self._target.fed
        self._target.close()
        self._target = targets.TARGETS[self._name]()
        self._since.clear()
        gc.collect()
        if self._count <= max(RENEWED, self._runs // 5):
            self._early_mib = resident_mib()
        told = {
            "inputs": self._count,
            "frames": self._fed,
            "seconds": time.monotonic() - self._began,
            "slowest_s": self._slowest_s,
            "early_mib": self._early_mib,
            "late_mib": resident_mib(),
        }
        (self._out / f"{self._name}.json").write_text(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=sorted(targets.TARGETS))
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--seconds", type=int, default=0, help="stop after this many seconds (default 0: no limit)"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    corpus = options.out / f"corpus-{options.target}"
    corpus.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(inputs.seeds(options.target)):
        (corpus / f"seed-{place}").write_bytes(data)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        return inputs.changed(options.target, data, Random(seed))[:longest]

    flags = [
        f"-runs={options.runs}",
        f"-seed={options.seed}",
        f"-max_total_time={options.seconds}",
        f"-timeout={HANGS_S}",
        f"-max_len={inputs.LONGEST}",
        f"-artifact_prefix={options.out}/{options.target}-",
        "-rss_limit_mb=3072",
        "-len_control=0",
    ]
    atheris.Setup(
        [sys.argv[0], *flags, str(corpus)],
        Run(options.target, options.runs, options.out),
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
