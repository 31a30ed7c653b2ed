"""`engine probe`: options and output."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from engine.cli.measuring.device_option import add_device
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options
from engine.config.checks.trainable import untrained
from engine.config.toml import load
from engine.planner.hardware.description import Hardware
from engine.probe.run import run_probe
from engine.probe.toml import to_toml

ABOUT = "measure links, matrix products and memory with a layout's ranks, and write a hardware description"
EPILOG = (
    "Every axis of the layout's grid is measured: latency and bandwidth of each collective that training uses on it. "
    "The description is TOML for engine plan --hardware FILE; without --out it goes to standard output."
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("probe", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument(
        "layout", nargs="?", help="a TOML file: the ranks and axes to measure, and the precision"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override a key of the layout"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the description to FILE")
    parser.add_argument("--json", action="store_true", help="print the description as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and short batches: takes seconds, but is less precise"
    )
    add_device(parser)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("probe", rest)
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse("engine probe needs a layout as first argument, a TOML file such as layouts/demo.toml")
    layout = load(options.layout, options.overrides + rest)
    if refusal := untrained(layout):
        refuse(refusal)
    if importlib.util.find_spec("torch") is None:
        refuse("a probe needs torch; pip install torch, then 'train-cockpit[engine]'")
    out: Path | None = options.out
    if out and (why := unwritable(out)):
        refuse(f"--out {out} cannot be written: {why}")
    try:
        status, found = run_probe(
            layout, device=options.device, quick=options.quick, say=lambda text: say(f"{text}\n")
        )
    except RunError as error:
        refuse(str(error))
    if found is None:
        raise SystemExit(status)
    if out:
        write(to_toml(found), out)
    if options.json:
        print_text(msgspec.json.encode(found).decode() + "\n")
    else:
        print_text("\n".join(summary(found, out)) + "\n" if out else to_toml(found))
    raise SystemExit(status)


def write(text: str, out: Path, option: str = "--out") -> None:
    """Write the file atomically. If that fails, print an error message and exit with status 2."""
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.write_text(text)
        unfinished.replace(out)
    except OSError as error:
        refuse(f"{option} {out} cannot be written: {error.strerror}")


def unwritable(out: Path) -> str | None:
    """The reason why the output file cannot be written, or None. Called before the measurement starts, so that no
    measured result is lost because the file cannot be written."""
    if out.is_dir():
        return "it is a folder"
    return None if out.parent.is_dir() else f"there is no folder {out.parent}"


def summary(found: Hardware, out: Path) -> list[str]:
    """The measurements as a table of at most 80 columns."""
    measured, device = found.measured, found.device
    assert measured is not None
    lines = [
        f"{measured.ranks} ranks, {measured.backend}, {measured.precision}"
        + (f", sharing {measured.cores} cores" if measured.oversubscribed else ""),
        f"product {device.peak[measured.precision] * found.efficiency.gemm / 1e9:,.1f} GFLOP/s a rank, half of it at "
        f"{found.efficiency.half_rows:.0f} rows; memory {device.memory_bandwidth / 1e9:,.1f} GB/s",
        f"operation of the host {found.efficiency.operation * 1e6:,.1f} us; "
        f"memory of a rank {device.memory_bytes / 2**30:,.1f} GiB",
        "",
        f"{'axis':8} {'collective':15} {'algorithm':9} {'ranks':>5} {'latency us':>11} {'GB/s':>8} {'error':>6}",
    ]
    for row in measured.collectives:
        rate = f"{1e-9 / row.per_byte:8.2f}" if row.per_byte else f"{'-':>8}"
        lines.append(
            f"{row.axis:8} {row.kind.replace('_', '-'):15} {row.algorithm:9} {row.ranks:5} "
            f"{row.latency * 1e6:11,.0f} {rate} {100 * row.error:4.0f} %"
        )
    return [*lines, "", f"written to {out}; engine plan LAYOUT --hardware {out} uses it"]
