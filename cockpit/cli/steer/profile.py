"""``cockpit profile``: traces some steps of the chosen ranks with torch.profiler, and merges the traces into one file
for Perfetto."""

import time
from pathlib import Path

from agents.protocol import CommandState, Value
from agents.state.stack_groups import ranks_text
from agents.waiting import wait_for_command
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.cli.steer.steering import request, steering
from cockpit.data import format, plain
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.export.traces import TraceError, merge
from cockpit.printing import complain, print_json, print_line, run_mark

FOLDER = "profile"  # in the run's folder
POLL_S = 0.2
Identity = tuple[int, int] | None


def profile(
    run: str | None,
    steps: int,
    which: str,
    first: int | None,
    out: Path | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Propose a profile of `steps` steps on the ranks that `which` selects, wait at most `timeout_s` for the traces,
    and merge them.
    """
    with steering(run) as connection:
        chosen: Value = int(which) if which.isdecimal() else which
        ranks, folder = _ranks(connection, chosen), _folder(connection)
        # A resumed run trains steps again, so there may be traces of the same steps from before.
        earlier = {path: _identity(path) for path in folder.glob("step*-rank*.json")}
        changes: dict[str, Value] = {"profile": steps, "profile_rank": chosen}
        if first is not None:
            changes["profile_from"] = first
        deadline = time.monotonic() + timeout_s
        id = request(lambda: connection.client.propose(changes))
        try:
            command = wait_for_command(connection.client, id, timeout_s)
        except TimeoutError as error:
            complain(f"{error}{run_mark(connection.store)}")
            return FAILED
        if command.state != "applied":
            return _report_refusal(connection, command, as_json)
        begins = max(command.applied_step or 0, first or 0)
        files = {rank: folder / f"step{begins:06}-rank{rank}.json" for rank in ranks}
        missing = _wait(connection, files, earlier, deadline)
    if missing:
        complain(
            f"no trace of {ranks_text(missing)} from step {begins} is in {folder}, because the run ended or needed "
            f"more than {timeout_s:g} s; see cockpit log"
        )
        return FAILED
    merged = out or folder / f"step{begins:06}.json.gz"
    try:
        events = merge(files, merged)
    except (TraceError, OSError) as error:
        raise CockpitError(f"the traces were not merged: {error}") from None
    if as_json:
        record = {"file": str(merged), "first": begins, "steps": steps, "ranks": ranks, "events": events}
        print_json(plain.answer(record, connection.store))
    else:
        what = f"{steps} step{'s' * (steps != 1)} from step {format.grouped(begins)}"
        print_line(
            f"{merged}: {what}, {ranks_text(ranks)}; open it in https://ui.perfetto.dev{run_mark(connection.store)}"
        )
    return DONE


def _folder(connection: Connection) -> Path:
    """The folder of the run's traces. Raises CockpitError if the run's folder is not on this machine."""
    folder = str(connection.store.fact("folder") or "")
    if not folder or not Path(folder).is_dir():
        where = format.clean(folder) or "with its traces"
        raise CockpitError(f"the run's folder {where} is not on this machine; run this command there")
    return Path(folder) / FOLDER


def _ranks(connection: Connection, which: Value) -> list[int]:
    """The ranks to profile. `which`: a rank number, ``all``, or a coordinate such as ``pp1``."""
    board = connection.store.state.board
    knob = next((knob for knob in board.knobs if knob.name == "profile_rank"), None) if board else None
    if knob is None:
        raise CockpitError("this run offers no profile; cockpit knobs lists what it offers")
    if refusal := knob.refusal(which):
        raise CockpitError(refusal)
    hellos = connection.store.state.hellos
    return [
        rank
        for rank in sorted(hellos)
        if which in ("all", rank, *(f"{axis}{at}" for axis, at in hellos[rank].coords.items()))
    ]


def _report_refusal(connection: Connection, command: CommandState, as_json: bool) -> int:
    if as_json:
        print_json(plain.answer(plain.outcome(command), connection.store))
    else:
        complain(f"{command.state}: {command.why}{run_mark(connection.store)}")
    return REFUSED


def _wait(
    connection: Connection, files: dict[int, Path], earlier: dict[Path, Identity], deadline: float
) -> list[int]:
    """Wait for the traces; return the ranks whose trace is missing at `deadline` or when the run ends. A file in
    `earlier` counts only after it was replaced."""

    def missing() -> list[int]:
        return [rank for rank, path in files.items() if _identity(path) in (None, earlier.get(path))]

    while ranks := missing():
        gone = connection.store.state.gone
        ended = all(rank in gone and gone[rank].over for rank in ranks)
        if time.monotonic() >= deadline or ended:
            return missing()
        connection.poll(POLL_S)
    return []


def _identity(path: Path) -> Identity:
    """What changes when a file is replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
