"""Waits until the ranks train in a new layout, and prints the time lost."""

from agents.protocol import CommandState, Facts
from agents.waiting import RunOverError, wait_for_restart
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.data import format, plain
from cockpit.data.sources.connection import Connection
from cockpit.printing import complain, print_json, print_line, run_mark

KNOB = "layout"


def report_restart(connection: Connection, id: str, timeout_s: float, as_json: bool) -> int:
    """Wait until the ranks have restarted in the layout that the command `id` requested, and print the training time
    lost."""
    try:
        found = wait_for_restart(connection.client, id, timeout_s)
    except (TimeoutError, RunOverError) as error:
        return _fail(connection, id, f"{error}; see cockpit log for its outcome", as_json)
    if isinstance(found, CommandState):
        if as_json:
            print_json(plain.answer({"state": found.state, "why": found.why}, connection.store))
        else:
            print_line(f"✗ {found.state}: {found.why}{run_mark(connection.store)}")
        return REFUSED
    if found.facts.get("cause") != "relayout":  # ranks died before they trained a step, and came back
        return _fail(
            connection, id, f"the ranks train again after a failure: {format.clean(found.text)}", as_json
        )
    _print_restart(connection, connection.client.state.commands[id], found.facts, as_json)
    return DONE


def _fail(connection: Connection, id: str, why: str, as_json: bool) -> int:
    complain(f"{why}{run_mark(connection.store)}")
    if as_json:
        command = connection.client.state.commands.get(id)
        state, revision = (command.state, command.revision) if command else ("unknown", 0)
        print_json(plain.answer({"state": state, "revision": revision, "why": why}, connection.store))
    return FAILED


def _print_restart(connection: Connection, command: CommandState, facts: Facts, as_json: bool) -> None:
    if as_json:
        layout = {"layout": command.changes.get(KNOB), "before": command.before.get(KNOB)}
        record = {"state": command.state, "revision": command.revision} | layout | dict(facts)
        print_json(plain.answer(record, connection.store))
        return
    lost_s = facts.get("lost_s")
    seconds = f"{lost_s:.1f} s" if isinstance(lost_s, float) else format.MISSING
    print_line(
        f"✓ applied at step {facts.get('step')} · revision {command.revision} · {facts.get('world')} ranks train · "
        f"lost {seconds} and {facts.get('lost_steps')} steps · cockpit undo goes back"
        f"{run_mark(connection.store)}"
    )
