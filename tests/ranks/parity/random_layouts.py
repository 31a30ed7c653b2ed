"""Compares training in random layouts with training in one process, in fp64.

    python -m tests.ranks.parity.random_layouts FOLDER FIRST LAST

Each seed from FIRST to LAST - 1 gives one layout. FOLDER/FIRST-LAST.jsonl gets one line per layout: the seed, the
ranks, the overrides, and the largest relative difference of loss, gradient norm and gradients over STEPS steps, or why
the layout failed. The exit status is 1 if a layout failed or its results differ by more than rounding explains.
"""

import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.ranks.parity.__main__ import run_case
from tests.ranks.parity.comparison import FP64_TOLERANCE
from tests.ranks.parity.random_case import random_case

STEPS = 4


def compare(seed: int, folder: Path) -> dict[str, Any]:
    """Run the random layout of a seed, and return its line for the results file."""
    case = random_case(seed)
    found: dict[str, Any] = {"seed": seed, "ranks": case.layout.ranks.world}
    try:
        run_case(case, folder, STEPS)
    except (SystemExit, Exception):  # noqa: BLE001 - a failure of one layout is reported, and the next one runs
        found["why"] = traceback.format_exc(limit=-2)
    else:
        result = json.loads((folder / "result.json").read_text())
        found["worst"] = max(max(distances) for distances in result["distance"].values())
        for what, fine in (
            ("it differs", found["worst"] < FP64_TOLERANCE),
            ("another routing", result["same_routing"] == STEPS),
            ("other drops", result["dropped"] == result["dropped_in_one_process"]),
            ("a refused change", all(ack[1] == "applied" for ack in result["acks"])),
        ):
            if not fine:
                found["why"] = what
        shutil.rmtree(folder)
    return found | {"overrides": " ".join(case.overrides), "script": case.script}


def main(folder: Path, first: int, last: int) -> int:
    torch.set_num_threads(1)  # this process forks, so it must not have started torch's thread pool
    folder.mkdir(parents=True, exist_ok=True)
    failed, worst = [], 0.0
    with (folder / f"{first}-{last}.jsonl").open("w") as lines:
        for seed in range(first, last):
            found = compare(seed, folder / str(seed))
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            worst = max(worst, found.get("worst", 0.0))
            if "why" in found:
                failed.append(seed)
                print(f"seed {seed}: {found['why']}\n{found['overrides']} {found['script']}", flush=True)
    print(f"{last - first} layouts, {len(failed)} failed {failed}; largest difference {worst:.1e}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
