"""The command `cockpit relayout`: changes keys of a live run's layout, such as `grid.tp`, and waits until the restarted
ranks train in the new layout.

The layout, written as a string, is a knob (docs/train/relayout.md), so a change of the layout is checked, previewed,
logged and undone like any other change.
"""

from collections.abc import Sequence

from agents.state.preview_checks import trust
from agents.waiting import RunOverError, wait_for_preview
from cockpit.cli.exit_status import DONE, REFUSED
from cockpit.cli.steer.restart_report import KNOB, report_restart
from cockpit.cli.steer.steering import ANSWER_S, plain_answer, print_estimates, request, steering
from cockpit.data import plain
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.knobs.values import split_change
from cockpit.printing import print_json, print_line, run_mark


def relayout(
    run: str | None, words: Sequence[str], dry_run: bool, reason: str, timeout_s: float, as_json: bool
) -> int:
    """Preview the layout that results from the changes in `words`. Unless `dry_run` is set, propose this layout, and
    wait until the ranks train in it.
    """
    keys = _keys(words)
    with steering(run) as connection:
        before = _layout(connection)
        text = " ".join(f"{key}={value}" for key, value in (_keys(before.split()) | keys).items())
        if not _preview(connection, text, as_json):
            return REFUSED
        if dry_run:
            return DONE
        id = request(lambda: connection.client.propose({KNOB: text}, reason=reason))
        return report_restart(connection, id, timeout_s, as_json)


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
    """The layout in force, as the value of the knob `layout`."""
    board = connection.store.state.board
    if board is None:
        raise CockpitError("the ranks have not sent their knobs yet; try again when they train")
    value = next((knob.value for knob in board.knobs if knob.name == KNOB), None)
    if not isinstance(value, str) and connection.store.simulated:
        raise CockpitError(
            "a simulated run cannot change its layout; start engine simulate with the other layout"
        )
    if not isinstance(value, str):
        raise CockpitError(
            "this run cannot change its layout while it is live, because torchrun or a script started its ranks; "
            "stop it, and resume it in another layout"
        )
    return value


def _preview(connection: Connection, text: str, as_json: bool) -> bool:
    """Print the predicted effect of the new layout. Returns whether the layout is legal."""
    try:
        id = connection.client.preview({KNOB: text})
        answer = wait_for_preview(connection.client, id, ANSWER_S)
    except (TimeoutError, RunOverError) as error:
        raise CockpitError(str(error)) from None
    trusts = trust(connection.client.state.events)
    if as_json:
        print_json(plain.answer({"kind": "preview"} | plain_answer(answer, trusts), connection.store))
    elif answer.why:
        print_line(f"✗ {answer.why}{run_mark(connection.store)}")
    else:
        print_estimates(answer, trusts)
    return not answer.why
