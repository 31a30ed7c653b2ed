"""`engine collectives`: options and output."""

import argparse
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from engine.cli.measuring.device_option import add_device
from engine.cli.measuring.probe import unwritable, write
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options
from engine.collectives.measured import DIRECT, TORCH
from engine.collectives.parts import SENT
from engine.planner.hardware.table import load
from engine.planner.timing.measured import HIERARCHICAL
from engine.probe.report import ALL, KINDS, Fit, Interval, Report, Settings, Time, added, report
from engine.probe.run_collectives import run_collectives
from engine.probe.toml import to_toml

ABOUT = "measure torch's all-reduce and the all-reduce algorithms over point-to-point messages"
EPILOG = (
    "Prints times by size and algorithm, fitted latency and bandwidth, and the fastest algorithm for each size. "
    "With --into, they are added to a hardware description, which engine plan and run.collectives of a layout use."
)
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_RANKS, MOST_BYTES, MOST_SIZES = 256, 2**30, 12
NAMES = sorted({TORCH, DIRECT, HIERARCHICAL, *(name for names in SENT.values() for name in names)})
MISSING = "·"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("collectives", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument("--ranks", default="4", metavar="N", help="ranks to start; default 4")
    parser.add_argument(
        "--node",
        metavar="N",
        help="ranks per node, for the hierarchical algorithms; default: these are not measured",
    )
    parser.add_argument(
        "--sizes", metavar="LIST", help="bytes of the buffer, such as 1KiB,64KiB,1MiB; default 1KiB to 4MiB"
    )
    parser.add_argument(
        "--kinds",
        metavar="LIST",
        default="all-reduce",
        help=f"collectives: {', '.join(map(_shown, KINDS))}; default all-reduce",
    )
    parser.add_argument(
        "--algorithms", metavar="LIST", help=f"algorithms to measure: {', '.join(NAMES)}; default all"
    )
    parser.add_argument("--dtype", choices=("fp64", "fp32", "bf16"), default="fp32", help="default fp32")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="add the result to a hardware description of engine probe"
    )
    parser.add_argument("--json", action="store_true", help="print the same content as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="short batches: takes seconds, but is less precise"
    )
    add_device(parser)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("collectives", rest)
    if rest:
        refuse(f"engine collectives takes no argument {rest[0]}; see engine collectives --help")
    settings = settings_of(options)
    into: Path | None = options.into
    hardware = load(into) if into else None
    if into and (why := unwritable(into)):
        refuse(f"--into {into} cannot be written: {why}")
    if importlib.util.find_spec("torch") is None:
        refuse("engine collectives needs torch; pip install torch, then 'train-cockpit[engine]'")
    try:
        status, measured = run_collectives(settings, say=lambda text: say(f"{text}\n"))
    except RunError as error:
        refuse(str(error))
    if measured is None:
        raise SystemExit(status)
    found, rows = report(settings, measured)
    if into and hardware:
        if hardware.measured and hardware.measured.backend != found.backend:
            refuse(
                f"--into {into} was measured on {hardware.measured.backend}, but the new times were measured on "
                f"{found.backend}; legal: a file "
                f"measured on {found.backend}"
            )
        write(to_toml(added(hardware, found, rows)), into, "--into")
    if options.json:
        print_text(msgspec.json.encode(found).decode() + "\n")
    else:
        print_text("\n".join(text(found, into)) + "\n")
    raise SystemExit(status)


def settings_of(options: argparse.Namespace) -> Settings:
    """What to measure, from the command line, such as the number of ranks, the collectives, algorithms and sizes. If an
    option is invalid, prints an error message and exits with status 2."""
    ranks = _whole("--ranks", options.ranks, 2, MOST_RANKS)
    node = None if options.node is None else _whole("--node", options.node, 1, MOST_RANKS)
    if node is not None and ranks % node:
        legal = [str(one) for one in range(1, ranks + 1) if ranks % one == 0]
        refuse(f"--node = {node} does not divide --ranks = {ranks}; legal: {', '.join(legal)}")
    kinds = tuple(kind.replace("-", "_") for kind in _list("--kinds", options.kinds, map(_shown, KINDS)))
    algorithms = _list("--algorithms", options.algorithms, NAMES) if options.algorithms is not None else ()
    if HIERARCHICAL in algorithms and node is None:
        refuse(
            "--algorithms = hierarchical needs --node, the number of ranks of a node; legal: a divisor of --ranks"
        )
    for kind in kinds:
        has = {TORCH, DIRECT, HIERARCHICAL, *SENT[kind]}
        if algorithms and not has & set(algorithms):
            refuse(
                f"--algorithms = {','.join(algorithms)}: {_shown(kind)} has none of these; legal: "
                f"{', '.join(sorted(has))}"
            )
    sizes = {"sizes": _sizes(options.sizes)} if options.sizes is not None else {}
    found = Settings(
        ranks,
        node,
        kinds,
        algorithms,
        **sizes,
        dtype=options.dtype,
        device=options.device,
        quick=options.quick,
    )
    if len(found.buffers) < 2:
        refuse(
            f"--sizes = {options.sizes} gives one size of {found.buffers[0]} bytes for {ranks} ranks, but "
            f"the fit needs two; legal: 2 to 12 sizes, such as 1KiB,64KiB,1MiB"
        )
    return found


def _whole(option: str, given: str, least: int, most: int) -> int:
    if not given.isascii() or not given.isdigit() or len(given) > 9 or not least <= int(given) <= most:
        refuse(f"{option} = {given} is not legal; legal: a whole number from {least} to {most}")
    return int(given)


def _list(option: str, given: str, legal: Sequence[str] | Iterator[str]) -> tuple[str, ...]:
    known = list(legal)
    for name in (names := given.split(",")):
        if name not in known:
            refuse(f"{option} = {name} is not known; legal: {', '.join(known)}, with commas between them")
    return tuple(dict.fromkeys(names))


def _sizes(given: str) -> tuple[int, ...]:
    found = []
    for word in given.split(","):
        match = re.fullmatch(r"([0-9]{1,10})([KMG]iB|B|)", word)
        size = int(match[1]) * UNITS[match[2]] if match else 0
        if not 1 <= size <= MOST_BYTES:
            refuse(f"--sizes = {word} is not legal; legal: 1 to 1GiB, such as 1KiB,64KiB,1MiB")
        found.append(size)
    if len(set(found)) > MOST_SIZES:
        refuse(f"--sizes has {len(set(found))} sizes; legal: up to {MOST_SIZES}")
    return tuple(sorted(set(found)))


def _shown(kind: str) -> str:
    return kind.replace("_", "-")


# ------------------------------------------------------------------------------------------------- text


def text(found: Report, into: Path | None) -> Iterator[str]:
    """The report as tables."""
    cores = f", sharing {found.cores} cores" if found.oversubscribed else ""
    node = f", {found.node} ranks per node" if found.node else ""
    yield f"{found.ranks} ranks, {found.backend}, {found.dtype}{cores}{node}"
    for kind in dict.fromkeys(time.kind for time in found.times):
        yield ""
        yield from _times(kind, [time for time in found.times if time.kind == kind])
        yield ""
        yield from _fits([fit for fit in found.fits if fit.kind == kind])
        yield ""
        yield f"fastest {_shown(kind)} by the fitted lines:"
        for band in found.chosen:
            if band.kind == kind:
                start, end = _size(band.from_bytes), band.to_bytes
                to = f"{start} to {_size(end)}" if end is not None else f"from {start}"
                yield f"  {to:22} {band.algorithm}"
    if into:
        yield ""
        yield f"added to {into}; run.collectives={into} in a layout uses it"


def _times(kind: str, times: Sequence[Time]) -> Iterator[str]:
    sizes = sorted({time.bytes for time in times})
    seconds = {(time.algorithm, time.bytes): time.seconds for time in times}
    best = {size: min(taken for (_, of), taken in seconds.items() if of == size) for size in sizes}
    yield f"{_shown(kind) + ', us':17}" + "".join(f"{_size(size):>10}" for size in sizes)
    for name in dict.fromkeys(time.algorithm for time in times):
        cells = ((seconds.get((name, size)), size) for size in sizes)
        yield f"{name:17}" + "".join(
            f"{MISSING:>9} " if taken is None else f"{taken * 1e6:9,.0f}{'*' if taken == best[size] else ' '}"
            for taken, size in cells
        )
    yield "* fastest in its column"


def _fits(fits: Sequence[Fit]) -> Iterator[str]:
    yield "seconds = latency + bytes x per byte [90 % interval]; alpha: time per message, beta: time per sent byte"
    yield f"{'':17}{'latency us':>24} {'ns a byte':>22} {'alpha us':>9} {'beta ns':>8} {'error':>6}"
    for fit in fits:
        if fit.algorithm == ALL:
            yield (
                f"alpha and beta over all algorithms whose messages are known: alpha {_interval(fit.alpha_s, 1e6)} us, "
                f"beta {_interval(fit.beta_s, 1e9)} ns, error {100 * fit.error:.0f} %"
            )
            continue
        alpha, beta = fit.alpha_s, fit.beta_s
        yield (
            f"{fit.algorithm:17}{_interval(fit.latency_s, 1e6):>24} {_interval(fit.per_byte_s, 1e9):>22} "
            f"{_number(alpha[0] * 1e6) if alpha else MISSING:>9} {_number(beta[0] * 1e9) if beta else MISSING:>8} "
            f"{100 * fit.error:4.0f} %"
        )


def _interval(interval: Interval | None, unit: float) -> str:
    if interval is None:
        return MISSING
    middle, low, high = (_number(number * unit) for number in interval)
    return f"{middle} [{low}, {high}]"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.4g} {unit}"
    return f"{size} B"
