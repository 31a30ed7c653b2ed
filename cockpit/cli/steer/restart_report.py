"""Waits until the ranks train in a new layout, and prints the time lost."""

import time
from collections.abc import Sequence

from agents.protocol import RESTART, CommandState, Event, Facts
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.data import format, plain
from cockpit.data.sources.connection import Connection
from cockpit.printing import complain, print_json, print_line

KNOB = "layout"


def report_restart(connection: Connection, id: str, started: int, timeout_s: float, as_json: bool) -> int:
    """Wait until the ranks have restarted in the layout that the command `id` requested, and print the training time
    lost. `started`: number of restarts before this command.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = connection.client.state
        command = state.commands.get(id)
        why = connection.client.denied.get(id) or (
            command.why if command and command.state in plain.REFUSALS else None
        )
        if why is not None:
            if as_json:
                state_name = command.state if command else "rejected"
                print_json(plain.marked({"state": state_name, "why": why}, connection.store))
            else:
                print_line(f"✗ {command.state if command else 'rejected'}: {why}")
            return REFUSED
        if command and (event := _restart(state.events, started)):
            _print_restart(connection, command, event.facts, as_json)
            return DONE
        connection.poll()
    complain(
        f"the ranks do not train in the new layout within {timeout_s:g} s; see cockpit log for its outcome"
    )
    return FAILED


def _restart(events: Sequence[Event], started: int) -> Event | None:
    """The newest event that reports a restart whose number is greater than `started`; None if no such event has arrived
    yet."""
    for event in reversed(events):
        number = event.facts.get(RESTART)
        if isinstance(number, int) and number > started:
            return event
    return None


def _print_restart(connection: Connection, command: CommandState, facts: Facts, as_json: bool) -> None:
    if as_json:
        layout = {"layout": command.changes.get(KNOB), "before": command.before.get(KNOB)}
        record = {"state": command.state, "revision": command.revision} | layout | dict(facts)
        print_json(plain.marked(record, connection.store))
        return
    lost_s = facts.get("lost_s")
    seconds = f"{lost_s:.1f} s" if isinstance(lost_s, float) else format.MISSING
    print_line(
        f"✓ applied at step {facts.get('step')} · revision {command.revision} · {facts.get('world')} ranks train · "
        f"lost {seconds} and {facts.get('lost_steps')} steps · cockpit undo goes back"
    )
