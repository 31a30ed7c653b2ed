"""`cockpit advise`: names the bottleneck of a run, with evidence, and ranks changes by predicted gain."""

from collections.abc import Sequence
from typing import Any

from agents.protocol import Changes
from agents.waiting import RunOverError, wait_for_preview
from cockpit.cli.exit_status import DONE
from cockpit.cli.steer.steering import ANSWER_S, steering
from cockpit.data import format, plain
from cockpit.data.diagnosis.evidence import evidence
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.knobs.advice import (
    NONE_FASTER,
    ON_THE_BOARD,
    candidate,
    interval_text,
    legal_changes,
    likely_text,
    refuted,
)
from cockpit.knobs.values import value_knobs
from cockpit.printing import print_json, print_line, print_table, run_mark
from engine.planner.advice import SHARED_CORES, Advice, Candidate, Ranked, advise, bottleneck


def advise_run(run: str | None, as_json: bool) -> int:
    """Print the advice."""
    with steering(run, operator=False) as connection:
        found = shown_advice(connection)
        store = connection.store
    if as_json:
        print_json(plain.answer(as_plain(found), store))
    else:
        _print(found)
        print_line(run_mark(store).removeprefix(" · "))
    return DONE


def shown_advice(connection: Connection) -> Advice:
    """The advice that the plan screen shows or, if the layout cannot be planned on this machine, advice from the run's
    own previews.
    """
    connection.poll()
    try:
        from cockpit.knobs.plan.suggestions import advised
    except ModuleNotFoundError:  # numpy is missing if only parts of the package are installed
        return find_advice(connection)
    planned = advised(connection.store) if evidence(connection.store) else None
    return planned or find_advice(connection)


def find_advice(connection: Connection, changes: Sequence[Changes] | None = None) -> Advice:
    """Ask the run for a preview of each of `changes`, and rank the changes by these previews. If `changes` is None,
    preview the changes that `legal_changes` lists."""
    connection.poll()
    store = connection.store
    measured = evidence(store)
    if measured is None:
        raise CockpitError("no step is done yet; try again when the run trains")
    if store.oversubscribed:
        return Advice(bottleneck(measured), [], [], [], SHARED_CORES)
    wanted = legal_changes(store) if changes is None else changes
    candidates = [_preview(connection, one, measured.memory_share) for one in wanted]
    values = {knob.name: knob.value for knob in value_knobs(store.state.board)}
    return advise(measured, candidates, refuted(store.state.trials.values(), values))


def _preview(connection: Connection, changes: Changes, memory_share: float | None) -> Candidate:
    try:
        id = connection.client.preview(changes)
        answer = wait_for_preview(connection.client, id, ANSWER_S)
    except (TimeoutError, RunOverError) as error:
        raise CockpitError(str(error)) from None
    return candidate(changes, answer, memory_share)


def as_plain(found: Advice) -> dict[str, Any]:
    """The advice as JSON with stable key names; gains are fractions of the step time."""
    return {
        "bottleneck": None
        if found.bottleneck is None
        else {
            "cause": found.bottleneck.cause,
            "share": found.bottleneck.share,
            "text": found.bottleneck.sentence,
        },
        "changes": [ranked_plain(one) for one in found.ranked],
        "tied": len(found.candidates),
        "left_out": found.left_out,
        "unknown": [{"changes": one.changes, "source": one.source} for one in found.unknown],
        "why": found.why_not,
    }


def ranked_plain(one: Ranked) -> dict[str, Any]:
    low, high = one.candidate.after_ms or (None, None)
    return {
        "changes": plain.plain(one.candidate.changes),
        "gain": one.likely,
        "gain_low": one.least,
        "gain_high": one.most,
        "undecided": one.undecided,
        "step_ms_low": low,
        "step_ms_high": high,
        "source": one.candidate.source,
    }


def ranked_rows(found: Advice) -> list[list[str]]:
    """The rows of a table of the ranked changes: a row of headings, then the changes, best first."""
    return [
        [ON_THE_BOARD, "step time", "likely", "from"],
        *(
            [one.candidate.words, interval_text(one), likely_text(one), format.clean(one.candidate.source)]
            for one in found.ranked
        ),
    ]


def _print(found: Advice) -> None:
    if found.bottleneck:
        print_line(format.spaced(found.bottleneck.sentence))
    if found.why_not:
        print_line(found.why_not)
        return
    if found.ranked:
        print_table(ranked_rows(found), right=frozenset({1, 2}))
        if len(found.candidates) > 1:
            words = " · ".join(one.candidate.words for one in found.candidates)
            print_line(f"order uncertain: each of these may be the best: {words}")
    else:
        print_line(NONE_FASTER)
    for sentence in found.left_out:
        print_line(sentence)
    if found.unknown:
        words = ", ".join(one.words for one in found.unknown)
        print_line(f"no predicted time: {words}; cockpit try measures one")
