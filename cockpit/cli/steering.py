"""Commands that ask what a change would do, try one out, and take one back; without a screen."""

from collections.abc import Sequence

from agents.protocol import Estimate, Previewed, TrialState
from agents.waiting import RunOverError, wait_for_preview, wait_for_trial
from cockpit.cli import headless
from cockpit.data import format, plain
from cockpit.data.connection import CockpitError, Connection
from cockpit.data.outcomes import trial_text
from cockpit.knobs.values import NEUTRAL
from cockpit.printing import complain, say, say_json, table

ANSWER_S = 10.0  # the leader answers between two of its agent's turns


def preview(run: str | None, words: Sequence[str], as_json: bool) -> int:
    """What a change would do, where the run can tell."""
    watch = headless.steer(run, words, operator=False)
    try:
        id = watch.client.preview(headless.wanted(watch, words))
        found = wait_for_preview(watch.client, id, ANSWER_S)
    except (TimeoutError, RunOverError) as error:
        raise CockpitError(str(error)) from None
    finally:
        watch.close()
    if as_json:
        say_json({key: value for key, value in plain.plain(found).items() if key != "id"})
    elif found.why:
        say(f"✗ {found.why}")
    else:
        _show(found)
    return headless.REFUSED if found.why else 0


def _show(found: Previewed) -> None:
    rows = [["", "now", "between", "likely", "from"]]
    rows += [[one.quantity, *_numbers(one), format.clean(one.source)] for one in found.estimates]
    table(rows, right=frozenset({1, 2, 3}))
    if found.loss_neutral is not None:
        say(NEUTRAL[found.loss_neutral])


def _numbers(one: Estimate) -> tuple[str, str, str]:
    def text(value: float | None) -> str:
        return format.MISSING if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"

    between = " .. ".join(map(text, one.interval)) if one.interval else format.MISSING
    return text(one.now), between, text(one.point)


def try_out(
    run: str | None, words: Sequence[str], steps: int, reason: str, timeout_s: float, as_json: bool
) -> int:
    """Try one knob for some steps and wait for the verdict; it goes on in the hub if this command ends."""
    watch = headless.steer(run, words)
    try:
        try:
            id = watch.client.try_out(headless.wanted(watch, words), steps, reason=reason)
        except ValueError as error:
            raise CockpitError(str(error)) from None
        return _verdict(watch, id, timeout_s, as_json)
    finally:
        watch.close()


def decide(run: str | None, keep: bool, timeout_s: float, as_json: bool) -> int:
    """End the trial under way."""
    watch = headless.steer(run, ())
    try:
        going = [trial for trial in watch.client.state.trials.values() if not trial.settled]
        if not going:
            raise CockpitError("no trial is under way; try one with cockpit try knob=value --steps N")
        watch.client.decide(going[0].id, keep)
        return _verdict(watch, going[0].id, timeout_s, as_json)
    finally:
        watch.close()


def _verdict(watch: Connection, id: str, timeout_s: float, as_json: bool) -> int:
    try:
        trial = wait_for_trial(watch.client, id, timeout_s)
    except (TimeoutError, RunOverError) as error:
        complain(f"{error}; it goes on by itself" if isinstance(error, TimeoutError) else str(error))
        known = watch.client.state.trials.get(id)
        if as_json:
            say_json(plain.plain(known) if known else {"state": "unknown"})
        return 1
    if as_json:
        say_json(plain.plain(trial))
    else:
        say(_line(trial))
    return headless.REFUSED if trial.state == "failed" else 0


def _line(trial: TrialState) -> str:
    return f"{'✗' if trial.state == 'failed' else '✓'} {trial_text(trial)}"


def undo(run: str | None, wait: bool, reason: str, timeout_s: float, as_json: bool) -> int:
    """Take back the newest change that is not undone yet."""
    watch = headless.steer(run, ())
    try:
        return headless.answer(watch, watch.client.undo(reason=reason), wait, timeout_s, as_json)
    finally:
        watch.close()
