"""The command `cockpit relayout`: changes how the ranks of a live run share the work, and waits until they train again.

The text of a layout is a knob (docs/relayout.md), so the change is checked, previewed, journalled and undone like every
other change.
"""

import time
from collections.abc import Sequence

from agents.protocol import RESTART, CommandState, Event, Facts
from agents.state.preview_checks import trust
from agents.waiting import RunOverError, wait_for_preview
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.cli.steer.steering import ANSWER_S, plain_answer, print_estimates, request, steering
from cockpit.data import format, plain
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.knobs.values import split_change
from cockpit.printing import complain, print_json, print_line

KNOB = "layout"


def relayout(
    run: str | None, words: Sequence[str], dry_run: bool, reason: str, timeout_s: float, as_json: bool
) -> int:
    """Preview the layout that `words` change, propose it unless `dry_run`, and wait until the ranks train in it."""
    keys = _keys(words)
    with steering(run) as connection:
        before = _layout(connection)
        text = " ".join(f"{key}={value}" for key, value in (_keys(before.split()) | keys).items())
        if not _preview(connection, text, as_json):
            return REFUSED
        if dry_run:
            return DONE
        started = connection.client.state.restarts
        id = request(lambda: connection.client.propose({KNOB: text}, reason=reason))
        return report_restart(connection, id, started, timeout_s, as_json)


def _keys(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        try:
            split_change(word)
        except ValueError:
            why = f"{word} is not a change of the layout; write section.key=value, such as grid.tp=2"
            raise CockpitError(why) from None
        key, _, value = word.partition("=")
        if key in found:
            raise CockpitError(f"{key} is given twice; name each key once")
        found[key] = value
    return found


def _layout(connection: Connection) -> str:
    """The text of the layout in force."""
    board = connection.store.state.board
    if board is None:
        raise CockpitError("the ranks have not sent their knobs yet; try again when they train")
    value = next((knob.value for knob in board.knobs if knob.name == KNOB), None)
    if not isinstance(value, str):
        raise CockpitError(
            "this run cannot change its layout while it is live, because torchrun or a script started its ranks; "
            "stop it, and resume it in another layout"
        )
    return value


def _preview(connection: Connection, text: str, as_json: bool) -> bool:
    """Print what the layout would do. Returns whether it is legal."""
    try:
        id = connection.client.preview({KNOB: text})
        answer = wait_for_preview(connection.client, id, ANSWER_S)
    except (TimeoutError, RunOverError) as error:
        raise CockpitError(str(error)) from None
    trusts = trust(connection.client.state.events)
    if as_json:
        print_json(plain.marked({"kind": "preview"} | plain_answer(answer, trusts), connection.store))
    elif answer.why:
        print_line(f"✗ {answer.why}")
    else:
        print_estimates(answer, trusts)
    return not answer.why


def report_restart(connection: Connection, id: str, started: int, timeout_s: float, as_json: bool) -> int:
    """Wait until the ranks train in the layout of the command `id`, and print the time lost. `started`: how often the
    ranks had been started again before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = connection.client.state
        command = state.commands.get(id)
        why = connection.client.denied.get(id) or (
            command.why if command and command.state in plain.REFUSALS else None
        )
        if why is not None:
            if as_json:
                print_json({"state": command.state if command else "rejected", "why": why})
            else:
                print_line(f"✗ {command.state if command else 'rejected'}: {why}")
            return REFUSED
        if command and (event := _restart(state.events, started)):
            _print_restart(command, event.facts, as_json)
            return DONE
        connection.poll()
    complain(
        f"the ranks do not train in the new layout within {timeout_s:g} s; cockpit log shows what became of it"
    )
    return FAILED


def _restart(events: Sequence[Event], started: int) -> Event | None:
    """The event that the ranks train again after more than `started` restarts."""
    for event in reversed(events):
        number = event.facts.get(RESTART)
        if isinstance(number, int) and number > started:
            return event
    return None


def _print_restart(command: CommandState, facts: Facts, as_json: bool) -> None:
    if as_json:
        layout = {"layout": command.changes.get(KNOB), "before": command.before.get(KNOB)}
        print_json({"state": command.state, "revision": command.revision} | layout | dict(facts))
        return
    lost_s = facts.get("lost_s")
    seconds = f"{lost_s:.1f} s" if isinstance(lost_s, float) else format.MISSING
    print_line(
        f"✓ applied at step {facts.get('step')} · revision {command.revision} · {facts.get('world')} ranks train · "
        f"lost {seconds} and {facts.get('lost_steps')} steps · cockpit undo goes back"
    )
