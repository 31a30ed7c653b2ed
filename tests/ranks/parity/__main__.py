"""The parity harness: compares the loss, the unclipped gradient norm and every gradient of a run in a layout with those
of a run in one process.

The reference is the whole model on one rank, without a process group, FSDP or a pipeline, in a single micro-batch. A
driver imports torch once, runs the cases one after another, and forks the ranks of each case:

    python -m tests.ranks.parity FOLDER [--device cpu|cuda] [NAME ...]

The reference always runs on the CPU; `--device` is the device of the ranks. With `make parity`, all cases run STEPS
steps. `make test` runs only the cases in QUICK, and only as many steps as their scripts need.

Tolerances are derived from rounding errors. In fp64 only rounding (1e-16 per operation) may differ, so after 20 steps
every gradient agrees to 1e-11, and a wrong scale is detected in the first step. In fp32, rounding errors grow over the
steps, so the tolerance is measured: the reference is run JOLTS more times, each time with every initial weight changed
by half a unit in the last place (2^-24 relative, random sign). At each step, a layout may differ from the reference by
MARGIN times the largest difference of these runs up to that step. In bf16 and fp16 the margin is smaller, because
changing each weight by half a unit in the last place changes the results more than a different summation order does.
There, the differences of single runs vary by a factor of three in the last steps, so more runs are needed to find how
large they can become.

Rounding may also change the router's choice between two almost equal scores (about one decision in a million). The
expert loads show such a change: from that step on, the two runs differ but are equally valid, so only loss and norm are
compared, with the tolerances FLIPPED. In fp64 cases, the routers must make the same choices as in the reference at
every step. In bf16, rounding changes the experts of some tokens at every step, so in bf16 cases the position of a token
in its sequence determines its experts in all runs (`fix_routing`), and all steps are compared.
"""

import argparse
import json
import logging
import sys
import textwrap
from pathlib import Path

import torch

from engine.device import DeviceChoice
from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext
from tests.gpu.one_rank import ONE_RANK
from tests.ranks.cases.case import SMALL, Case
from tests.ranks.cases.cases import CASES, STEPS, steps_of
from tests.ranks.parity.comparison import FP64_TOLERANCE, MARGIN, distance, same_routing
from tests.ranks.parity.laid_out import as_laid_out
from tests.ranks.parity.one_process import one_process
from tests.ranks.parity.trace import merged

ALL = CASES | ONE_RANK
JOLTS = {"fp32": 3, "bf16": 8, "fp16": 8}


def run_case(case: Case, folder: Path, steps: int = STEPS, device: DeviceChoice = "cpu") -> None:
    """Run `case` with its ranks on `device`, and write its `result.json`: differences by step, and, in fp32 and bf16,
    the differences that rounding alone causes."""
    layout = case.layout
    dtype = torch.float64 if case.fp64 else torch.float32

    def reference(context: RankContext) -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)  # with two threads, ranks that share cores would slow each other down
        folder.mkdir(parents=True, exist_ok=True)
        truth = one_process(layout, case.script, steps)
        jolts = 0 if case.fp64 else JOLTS[layout.train.precision]
        jolted = [one_process(layout, case.script, steps, seed) for seed in range(jolts)]
        rounding = [(same_routing(jolt, truth), distance(jolt, truth)) for jolt in jolted]
        torch.save((truth, rounding), folder / "truth.pt")

    def laid_out(context: RankContext) -> None:
        torch.set_default_dtype(dtype)
        logging.disable(logging.WARNING)  # torch prints a warning for each gather in full_tensor
        as_laid_out(context, layout, case.script, steps, folder, device)

    def compare(context: RankContext) -> None:
        truth, jolted = torch.load(folder / "truth.pt", weights_only=False)
        trace = merged(folder)
        rounding = {
            what: [
                max((jolt[what][step] for same, jolt in jolted if step < same), default=0.0)
                for step in range(steps)
            ]
            for what in ("loss", "norm", "gradient")
            if jolted
        }
        result = {
            "distance": distance(trace, truth),
            "rounding": rounding,
            "same_routing": same_routing(trace, truth),
            "dropped": trace.dropped,
            "dropped_in_one_process": truth.dropped,
            "losses": trace.losses,
            "events": trace.events,
            "placed": [sum(m != sorted(m) for m in maps.values()) for maps in trace.maps],
            "acks": [[ack.revision, ack.state, ack.step, ack.why] for ack in trace.acks],
            "knobs": trace.knobs,
        }
        (folder / "result.json").write_text(json.dumps(result))
        for saved in folder.glob("*.pt"):
            saved.unlink()

    for world, work in ((1, reference), (layout.ranks.world, laid_out), (1, compare)):
        name_of_rank = layout.ranks.name if world > 1 else str
        if launch(world, work, name_of_rank=name_of_rank, hub="none", run="parity", run_dir=folder):
            raise SystemExit(1)


def report(folder: Path, names: list[str]) -> str:
    """The results of the cases in `folder` as a Markdown table."""
    lines = [
        "| case | ranks | overrides of the demo | | loss | norm | gradient | allowed | steps | drops a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        case, result = ALL[name], json.loads((folder / name / "result.json").read_text())
        same = result["same_routing"]
        worst = [max(result["distance"][what][:same], default=0.0) for what in ("loss", "norm", "gradient")]
        worst[2] = max(worst[2], *result["distance"].get("average", []), 0.0)
        precision = "fp64" if case.fp64 else case.layout.train.precision
        allowed = FP64_TOLERANCE
        if not case.fp64:
            allowed = MARGIN[precision] * max(result["rounding"]["gradient"][:same])
        figures = " | ".join(f"{figure:.1e}" for figure in (*worst, allowed))
        drops = f"{sum(result['dropped']) / len(result['dropped']):.0f}" if any(result["dropped"]) else "none"
        world = case.layout.ranks.world
        overrides = " ".join(case.overrides).replace(" ".join(SMALL), "*small*")
        overrides = overrides if case.of == "demo" else f"*{case.of}* {overrides}"
        lines.append(f"| {name} | {world} | {overrides} | {precision} | {figures} | {same} | {drops} |")
    small = textwrap.fill(f"*small* is `{' '.join(SMALL)}`.", 120, break_on_hyphens=False)
    return "\n".join([*lines, "", small]) + "\n"


def main(folder: Path, names: list[str], device: DeviceChoice) -> None:
    torch.set_num_threads(1)  # the parent forks, so it must not have started torch's thread pool
    for name in names or CASES:
        run_case(ALL[name], folder / name, steps_of(name) if names else STEPS, device)
    sys.stdout.write(report(folder, names or list(CASES)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.parity")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; default: all")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks; default cpu"
    )
    options = parser.parse_intermixed_args()
    if unknown := sorted(set(options.names) - set(ALL)):
        parser.error(
            f"no case is named {unknown[0]!r}; the names are in docs/evidence/parity.md and "
            "tests/gpu/one_rank.py"
        )
    main(options.folder, options.names, options.device)
