"""``cockpit compare``: prints what differs between two runs, and their metrics at the same steps."""

from collections.abc import Sequence

from agents.recording.format import RecordingError
from cockpit.data import format
from cockpit.data.comparison.compared_runs import (
    Difference,
    Pair,
    RunCurves,
    common_steps,
    differences,
    last_common,
    load_run_curves,
    table,
)
from cockpit.data.curves.job_metrics import change
from cockpit.data.diagnosis.status import SIMULATED
from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.recorded import folder_of
from cockpit.printing import print_json, print_line, print_table, report_missing

AT_MOST = 6  # number of steps in the printed table; the JSON output has more
IN_JSON = 32


def compare(one: str, other: str, as_json: bool) -> int:
    """Compare the recordings of two runs, each up to its current end. Returns the exit status."""
    folders = folder_of(one), folder_of(other)
    if folders[0].resolve() == folders[1].resolve():
        raise CockpitError(f"{one} and {other} are the same run; name two different runs")
    first, second = (load_run_curves(folder) for folder in folders)
    found = differences(first, second)
    steps = common_steps(first, second, IN_JSON if as_json else AT_MOST)
    try:
        pairs = table(first, second, steps)
    except RecordingError as error:
        raise CockpitError(str(error)) from None
    if as_json:
        print_json(_record(first, second, found, steps, pairs))
    else:
        _print(first, second, found, steps, pairs)
    notes = [f"{run.name}: {text}" for run in (first, second) for text in run.damage]
    return report_missing(notes)


def _record(
    one: RunCurves, other: RunCurves, found: Sequence[Difference], steps: Sequence[int], pairs: Sequence[Pair]
) -> dict[str, object]:
    return {
        "runs": [
            {
                "name": run.name,
                "last_step": run.last,
                "simulated": run.store.simulated,
                "incomplete": run.damage,
            }
            for run in (one, other)
        ],
        "differences": [
            {"kind": row.kind, "key": row.key, "values": [_known(value) for value in row.values]}
            for row in found
        ],
        "last_common_step": last_common(one, other),
        "steps": list(steps),
        "metrics": [
            {"metric": pair.metric.key, "unit": pair.metric.unit, "step": pair.step, "values": pair.values}
            for pair in pairs
        ],
    }


def _known(value: str) -> str | None:
    return None if value == format.MISSING else value


def _print(
    one: RunCurves, other: RunCurves, found: Sequence[Difference], steps: Sequence[int], pairs: Sequence[Pair]
) -> None:
    for letter, run in zip("AB", (one, other), strict=True):
        mark = f" · {SIMULATED}" if run.store.simulated else ""
        print_line(f"{letter}  {run.name} · last step {format.grouped(run.last)}{mark}")
    print_line("")
    if not found:
        print_line("no difference in layout, knobs and facts")
    else:
        if not (one.layout and other.layout):
            print_line("the layout of a run is missing: only facts and knobs are compared")
        rows = [["difference", "", "A", "B"]]
        print_table([*rows, *([row.kind, row.key, *row.values] for row in found)])
    print_line("")
    if not steps:
        print_line("the runs have no step in common")
        return
    rows = [["metric", "", *(f"step {format.grouped(step)}" for step in steps)]]
    by_metric: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_metric.setdefault(pair.metric.key, []).append(pair)
    for row in by_metric.values():
        metric = row[0].metric
        rows.append([metric.title, "A", *(metric.text(pair.values[0]) for pair in row)])
        rows.append([metric.unit, "B", *(metric.text(pair.values[1]) for pair in row)])
        rows.append(["", "A against B", *(_change(pair) or format.MISSING for pair in row)])
    print_table(rows, right=frozenset(range(2, 2 + len(steps))))


def _change(pair: Pair) -> str:
    first, second = pair.values
    return "" if first is None or second is None else change(second, first)
