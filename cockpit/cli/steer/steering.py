"""Commands that steer a run without a screen: set, undo, preview, try. Each command returns its exit status.

Each command connects (`steering`), sends its request, waits for the outcome, and prints it as text or JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agents.protocol import Estimate, KnobState, Previewed, TrialState, Value
from agents.state.preview_checks import Trust, trust
from agents.waiting import RunOverError, wait_for_command, wait_for_preview, wait_for_trial
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.cli.steer.restart_report import KNOB, report_restart
from cockpit.data import format, plain
from cockpit.data.diagnosis.evidence import trust_text
from cockpit.data.log.outcomes import trial_text
from cockpit.data.sources.connection import CockpitError, Connection, address, target
from cockpit.knobs.values import NEUTRAL, fit, only_value, split_change
from cockpit.printing import complain, print_json, print_line, print_table, run_mark

# maximum wait for a preview; the leader rank answers only between two turns of its agent's loop
ANSWER_S = 10.0


@contextmanager
def steering(
    run: str | None, words: Sequence[str] = (), operator: bool = True, watch_only: bool = False
) -> Iterator[Connection]:
    """Context manager for the connection of a command to the hub. A command that changes the run (`operator`) needs the
    run's name if several runs are live. Inside the context, the run's knobs, with their
    current and legal values, are already known, unless the run is still starting. Malformed arguments (`words`) are
    rejected before the command connects."""
    if words and all("=" in word for word in words):
        parse_changes(words, {})
    if operator and run is None:
        address(None)  # raises an error if no run is live
        run = target(None, changing=True)
    with Connection(run, operator, watch_only=watch_only) as connection:
        try:
            connection.wait_for_snapshot()
        except CockpitError:
            if not connection.answered:
                raise
        try:
            yield connection
        except CockpitError as error:
            raise CockpitError(f"{error}{run_mark(connection.store)}") from None


def request(send: Callable[[], str]) -> str:
    """Send a request and return its id; raise CockpitError if the client refuses the request."""
    try:
        return send()
    except ValueError as error:
        raise CockpitError(str(error)) from None


def requested_changes(connection: Connection, words: Sequence[str]) -> dict[str, Value]:
    """The changes that `words` request, with values converted to the types of the run's knobs."""
    board = connection.store.state.board
    return parse_changes(words, {knob.name: knob for knob in board.knobs} if board else {})


def parse_changes(words: Sequence[str], board: Mapping[str, KnobState]) -> dict[str, Value]:
    """Parse arguments, each of which is ``knob=value`` or the name of an action. Raise CockpitError if an argument is
    malformed or a knob is named twice."""
    changes: dict[str, Value] = {}
    for word in words:
        value_of_action = only_value(board[word]) if word in board else None
        if value_of_action is None and word in board and board[word].action:
            ways = ", ".join(f"{word}={value}" for value in board[word].legal.choices)
            raise CockpitError(f"{word} needs a value; legal: {ways}")
        if board and word.isidentifier() and word not in board:
            actions = ", ".join(name for name, knob in board.items() if knob.action) or "none"
            raise CockpitError(
                f"{word} is not an action of this run; legal: knob=value, such as micro_batches=8, or one of its "
                f"actions: {actions}"
            )
        try:
            name, value = split_change(word) if value_of_action is None else (word, value_of_action)
        except ValueError as error:
            raise CockpitError(str(error)) from None
        if name in changes:
            raise CockpitError(f"{name} is given twice; name each knob once")
        changes[name] = fit(board[name], value) if name in board else value
    return changes


# -------------------------------------------------------------------------------------------- set and undo


def change(
    run: str | None, words: Sequence[str], wait: bool, timeout_s: float, as_json: bool, reason: str = ""
) -> int:
    """Propose changes, which the hub and the ranks accept or refuse. With `wait`, wait until every rank has applied the
    changes."""
    with steering(run, words) as connection:
        changes = requested_changes(connection, words)
        id = request(lambda: connection.client.propose(changes, reason=reason))
        return _report_command(connection, id, wait, timeout_s, as_json)


def undo(run: str | None, wait: bool, reason: str, timeout_s: float, as_json: bool) -> int:
    """Revert the newest change that is still in force."""
    with steering(run) as connection:
        id = connection.client.undo(reason=reason)
        return _report_command(connection, id, wait, timeout_s, as_json)


def _report_command(connection: Connection, id: str, wait: bool, timeout_s: float, as_json: bool) -> int:
    """Wait for the hub's answer to a proposal and print it. With `wait`, also wait for the outcome on every rank and,
    after a change of the layout, until the restarted ranks train."""
    try:
        command = wait_for_command(connection.client, id, timeout_s, settled=wait)
    except TimeoutError as error:
        return _report_timeout(connection, id, str(error), as_json)
    refused = command.state in plain.REFUSALS
    partial = command.state == "applied" and not command.settled and (wait or command.failed > 0)
    incomplete = partial or (command.state == "applied" and command.settled and bool(command.why))
    mark = run_mark(connection.store)
    if as_json:
        print_json(plain.answer(plain.outcome(command), connection.store))
    elif refused:
        print_line(f"✗ {command.state}: {command.why}{mark}")
    elif command.state == "applied":
        at = format.grouped(command.applied_step)
        why = f": {command.why}" if incomplete and command.why else ""
        sign = "✗" if incomplete else "✓"
        acks = f"{command.acks}/{command.world}"
        print_line(f"{sign} applied {acks} at step {at} · revision {command.revision}{why}{mark}")
    else:
        why = f": {command.why}" if command.why else ""
        print_line(f"· accepted as revision {command.revision}{why}{mark}")
    if wait and not refused and KNOB in command.changes:
        return report_restart(connection, id, timeout_s, as_json)
    return REFUSED if refused or incomplete else DONE


def _report_timeout(connection: Connection, id: str, why: str, as_json: bool) -> int:
    """Report that the outcome of a change was not known in time. If no rank has applied the change yet, it stays in the
    hub's queue and may still be applied."""
    command = connection.client.state.commands.get(id)
    queued = command is None or command.state == "accepted"
    goes_on = "; it stays in the queue and may still be applied" if queued else ""
    complain(f"{why}{goes_on}{run_mark(connection.store)}")
    if as_json:
        state, revision = (command.state, command.revision) if command else ("unknown", 0)
        print_json(plain.answer({"state": state, "revision": revision, "why": why}, connection.store))
    return FAILED


# ------------------------------------------------------------------------------------------------- preview


def preview(run: str | None, words: Sequence[str], as_json: bool) -> int:
    """Print the effect that the run predicts for a change."""
    with steering(run, words, operator=False) as connection:
        answer, trusts = ask_preview(connection, words)
    if as_json:
        print_json(plain.answer(plain_answer(answer, trusts), connection.store))
    elif answer.why:
        print_line(f"✗ {answer.why}{run_mark(connection.store)}")
    else:
        print_estimates(answer, trusts)
        print_line(run_mark(connection.store).removeprefix(" · "))
    return REFUSED if answer.why else DONE


def ask_preview(connection: Connection, words: Sequence[str]) -> tuple[Previewed, Mapping[str, Trust]]:
    """The leader rank's answer to a preview query and, for each predicted quantity, how accurate earlier previews
    were."""
    changes = requested_changes(connection, words)
    try:
        id = request(lambda: connection.client.preview(changes))
        answer = wait_for_preview(connection.client, id, ANSWER_S)
    except (TimeoutError, RunOverError) as error:
        raise CockpitError(str(error)) from None
    return answer, trust(connection.client.state.events)


def plain_answer(answer: Previewed, trusts: Mapping[str, Trust]) -> dict[str, Any]:
    """The answer to a preview query as a dictionary for JSON output. Each estimate also contains how many earlier
    previews of its quantity were checked in this run, and how many measured values were within the predicted interval.
    """
    record: dict[str, Any] = plain.plain(answer)
    del record["id"]
    for one in record["estimates"]:
        found = trusts.get(one["quantity"])
        one["checks"], one["hits"] = (found.checks, found.hits) if found else (0, 0)
        one["mean_error"] = found.mean_error if found else None
    return record


def print_estimates(answer: Previewed, trusts: Mapping[str, Trust]) -> None:
    """Print the estimates of a preview as a table."""
    rows = [["", "now", "between", "likely", "so far", "from"]]
    rows += [
        [
            one.quantity,
            *_numbers(one),
            trust_text(trusts.get(one.quantity)) or format.MISSING,
            format.clean(one.source),
        ]
        for one in answer.estimates
    ]
    print_table(rows, right=frozenset({1, 2, 3}))
    if answer.loss_neutral is not None:
        print_line(NEUTRAL[answer.loss_neutral])


def _numbers(one: Estimate) -> tuple[str, str, str]:
    def text(value: float | None) -> str:
        return format.grouped(value, ".4g" if value is not None and abs(value) < 1e4 else ".0f")

    between = " .. ".join(map(text, one.interval)) if one.interval else format.MISSING
    return text(one.now), between, text(one.point)


# -------------------------------------------------------------------------------------------------- trials


def start_trial(
    run: str | None, words: Sequence[str], steps: int, reason: str, timeout_s: float, as_json: bool
) -> int:
    """Start a trial and wait for its outcome; the hub continues the trial even if this command ends."""
    with steering(run, words) as connection:
        changes = requested_changes(connection, words)
        id = request(lambda: connection.client.start_trial(changes, steps, reason=reason))
        return _report_trial(connection, id, timeout_s, as_json)


def end_trial(run: str | None, keep: bool, timeout_s: float, as_json: bool) -> int:
    """End the running trial: keep its value or revert it."""
    with steering(run) as connection:
        trials = [trial for trial in connection.client.state.trials.values() if not trial.settled]
        if not trials:
            raise CockpitError("no trial is running; start one with cockpit try knob=value --steps N")
        connection.client.decide(trials[0].id, keep)
        return _report_trial(connection, trials[0].id, timeout_s, as_json)


def _report_trial(connection: Connection, id: str, timeout_s: float, as_json: bool) -> int:
    """Wait for the outcome of a trial and print it."""
    try:
        trial = wait_for_trial(connection.client, id, timeout_s)
    except (TimeoutError, RunOverError) as error:
        goes_on = "; the hub continues the trial" if isinstance(error, TimeoutError) else ""
        complain(f"{error}{goes_on}{run_mark(connection.store)}")
        unsettled: TrialState | None = connection.client.state.trials.get(id)
        if as_json:
            found = plain.plain(unsettled) if unsettled else {"state": "unknown"}
            print_json(plain.answer(found, connection.store))
        return FAILED
    failed = trial.state == "failed"
    if as_json:
        print_json(plain.answer(plain.plain(trial), connection.store))
    else:
        print_line(f"{'✗' if failed else '✓'} {trial_text(trial)}{run_mark(connection.store)}")
    return REFUSED if failed else DONE
