"""Tables and charts of `engine plan --roofline` and `--scaling`, in the terminal or as SVG."""

import argparse
from pathlib import Path
from typing import Any

from engine.cli.planning.chart import Chart, Line, cells, has_plotext, svg
from engine.cli.planning.plan_text import scaled, seconds
from engine.cli.usage import refuse
from engine.planner.hardware.description import Hardware
from engine.planner.roofline import Level, roof, roofline
from engine.planner.scaling import Kind, Point, scaling
from engine.planner.workload.job import Job

NEEDS = "needs a machine: give --hardware NAME or FILE, or [hardware] in the layout"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `engine plan` that show a chart instead of a plan."""
    parser.add_argument(
        "--roofline", action="store_true", help="communication roofline: what bounds each level of links"
    )
    parser.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        help="time against the number of GPUs: with the same batch per step (strong) or per rank (weak)",
    )
    parser.add_argument(
        "--gpus",
        metavar="N|N,N,...",
        help="with --search: number of ranks (default: the layout's); with --scaling: numbers of ranks "
        "(default: the layout's, and six doublings of it)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --roofline or --scaling: draw to FILE")


def charts(
    options: argparse.Namespace, name: str, job: Job, hardware: Hardware | None, release: str | None
) -> tuple[str, dict[str, Any]] | None:
    """The text and the JSON of the chart that the options select, or None if no chart is selected. Writes the SVG if
    `--svg` is given."""
    if options.roofline and options.scaling:
        refuse("--roofline and --scaling cannot be combined; legal: one of them")
    if not options.roofline and not options.scaling:
        given = next((flag for flag in ("gpus", "svg") if getattr(options, flag) is not None), None)
        if given:
            other = "--roofline" if given == "svg" else "--search"
            refuse(f"--{given} requires --scaling or {other}")
        return None
    if options.roofline and options.gpus:
        refuse("--roofline does not take --gpus, because it uses the layout's number of ranks")
    if hardware is None:
        refuse(f"--{'roofline' if options.roofline else 'scaling'} {NEEDS}")
    if options.roofline:
        levels = roofline(job, hardware, release)
        chart, lines, tree = roofline_chart(name, levels), roofline_table(levels), roofline_json(levels)
    else:
        points = scaling(job, hardware, options.scaling, _counts(options.gpus), release)
        if not any(point.prediction for point in points):
            refuse(f"--scaling {options.scaling}: no number of GPUs is legal; {points[0].refusal}")
        chart = scaling_chart(name, options.scaling, points)
        lines, tree = scaling_table(points), scaling_json(options.scaling, points)
    if options.svg:
        try:
            options.svg.write_text(svg(chart))
        except OSError as error:
            refuse(f"--svg {options.svg} cannot be written: {error.strerror}")
    drawn = ["", *cells(chart)] if has_plotext() else []
    return "\n".join([chart.title, "", *lines, *drawn]) + "\n", tree


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    counts = [
        int(word)
        for word in text.split(",")
        if word.isascii() and word.isdecimal() and 0 < int(word) <= 10**6
    ]
    if len(counts) != len(text.split(",")):
        refuse(f"--gpus {text} is not legal; legal: whole numbers from 1 to 1000000, such as 64,128,256")
    return counts


def roofline_table(levels: tuple[Level, ...]) -> list[str]:
    """A table with one row for each kind of link, such as NVLink, and, below the table, the bytes, times and advice for
    each kind that the job uses."""
    lines = [f"{'link':12}{'GB/s':>8}{'latency':>9}{'sent a step':>13}{'CCR':>9}{'ridge':>9}  bound by"]
    for level in levels:
        ccr = f"{level.ccr:,.0f}" if level.sent else "-"
        lines.append(
            f"{level.link.name[:11]:12}{level.bytes_per_s / 1e9:8.3g}{seconds(level.link.latency):>9}"
            f"{scaled(level.sent):>11}B {ccr:>9}{level.ridge:9,.0f}  {level.regime if level.sent else 'unused'}"
        )
    lines.append("CCR and ridge are FLOPs for each byte that a rank sends")
    for level in levels:
        if level.sent:
            parts = " · ".join(f"{axis} {scaled(size)}B" for axis, size in level.bytes.items())
            causes = " · ".join(f"{cause} {seconds(taken)}" for cause, taken in level.seconds.items())
            lines += ["", f"{level.link.name}: {parts}", f"  {causes}", f"  {level.advice}"]
    return lines


def roofline_json(levels: tuple[Level, ...]) -> dict[str, Any]:
    return {
        "roofline": [
            {
                "link": level.link.name,
                "bytes_per_s": level.bytes_per_s,
                "latency_s": level.link.latency,
                "flops_per_s": level.flops_per_s,
                "flops": level.flops,
                "bytes": level.bytes,
                "messages": level.messages,
                "ccr": level.ccr if level.sent else None,
                "ridge": level.ridge,
                "seconds": level.seconds,
                "bound_by": level.regime if level.sent else None,
                "advice": level.advice if level.sent else None,
            }
            for level in levels
        ]
    }


def roofline_chart(name: str, levels: tuple[Level, ...]) -> Chart:
    """One roofline for each kind of link, such as NVLink, and a marker for the job on each kind that it uses."""
    used = [level for level in levels if level.sent]
    ends = [value for level in levels for value in (level.ridge, level.ccr if level.sent else level.ridge)]
    low, high = min(ends) / 10, max(ends) * 10
    lines = []
    for level in levels:
        xs = (low, level.ridge, high)
        points = tuple((x, roof(x, level.flops_per_s, level.bytes_per_s)) for x in xs)
        lines.append(Line(f"{level.link.name} {level.bytes_per_s / 1e9:.3g} GB/s", points))
    for level in used:
        at = (level.ccr, roof(level.ccr, level.flops_per_s, level.bytes_per_s))
        lines.append(Line(f"this job on {level.link.name}: {level.ccr:,.0f}", (at,), marks=True))
    title = f"{name}: communication roofline of a rank"
    return Chart(title, "FLOPs for each byte sent (CCR)", "FLOP/s", tuple(lines), log_y=True)


def scaling_table(points: list[Point]) -> list[str]:
    lines = [f"{'GPUs':>8}{'batch':>10}{'step':>10}{'tok/s':>10}{'MFU':>8}{'efficiency':>12}  bound by"]
    for point in points:
        if point.prediction is None:
            lines.append(f"{point.ranks:8,}  {point.refusal}"[:80])
            continue
        time = point.prediction
        lines.append(
            f"{point.ranks:8,}{point.batch:10,}{seconds(time.step_s[1]):>10}{scaled(time.tokens_per_s):>10}"
            f"{100 * time.mfu:6.1f} %{100 * point.efficiency:10.1f} %  {time.bound_by[0]}"
        )
    return lines


def scaling_json(kind: Kind, points: list[Point]) -> dict[str, Any]:
    return {
        "scaling": kind,
        "points": [
            {
                "ranks": point.ranks,
                "global_batch": point.batch or None,
                "step_s": point.prediction.step_s[1] if point.prediction else None,
                "tokens_per_s": point.prediction.tokens_per_s if point.prediction else None,
                "mfu": point.prediction.mfu if point.prediction else None,
                "efficiency": point.efficiency if point.prediction else None,
                "bound_by": point.prediction.bound_by[0] if point.prediction else None,
                "refusal": point.refusal or None,
            }
            for point in points
        ],
    }


def scaling_chart(name: str, kind: Kind, points: list[Point]) -> Chart:
    """A chart of the efficiency in percent over the number of ranks."""
    known = tuple((float(point.ranks), 100 * point.efficiency) for point in points if point.prediction)
    ideal = (known[0], (known[-1][0], 100.0))
    lines = (Line("ideal", ideal), Line("predicted", known, marks=True))
    return Chart(f"{name}: {kind} scaling", "GPUs", "efficiency, %", lines)
