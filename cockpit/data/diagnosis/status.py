"""The first status line: the state word, such as LIVE or STALLED, and the fields beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level, alerted, diagnosis, not_finite, paused
from cockpit.data.link import LinkState
from cockpit.data.log.outcomes import trial_changes, trial_progress
from cockpit.data.store import Store

SIMULATED = "SIMULATED"
"""The mark of a run that `engine simulate` computes; every output shows it."""

_LINK_LEVEL = {
    LinkState.WAITING: Level.NOTE,
    LinkState.LIVE: Level.GOOD,
    LinkState.PLAYBACK: Level.NOTE,
    LinkState.STALE: Level.WARN,
    LinkState.ENDED: Level.GOOD,
    LinkState.FAILED: Level.BAD,
}


GRAVITY = (Level.NOTE, Level.GOOD, Level.WARN, Level.BAD)
ALWAYS = -1  # priority of a field that is never dropped
WHOLE = -2  # priority of a field that is never dropped, and shortened only if nothing else is left to drop
FIGURES = 5  # highest priority number of the fields whose words are shortened before one of them is dropped
BEHIND_AFTER_S = 2.0  # over a slow connection, a step may take several frames
NAME_CHARS = 12  # maximum length of the short form of the run's name


@dataclass(frozen=True)
class StatusField:
    """One field of the status line. A narrow terminal drops the field with the largest `priority` number first, and
    never one with priority `ALWAYS` or `WHOLE`. `short`: a shorter form of `text` with the same numbers, or "" if there
    is none."""

    text: str
    priority: int
    level: Level | None = None
    short: str = ""


def fitting(
    fields: Sequence[StatusField], fits: Callable[[Sequence[StatusField]], bool]
) -> list[StatusField]:
    """The fields that fit in a line. If the fields are too long, fields with a priority number above `FIGURES` are
    dropped first. Then fields are replaced by their short forms. The remaining fields are dropped only if the line is
    still too long.
    """
    kept = list(fields)
    ranked = sorted(fields, key=lambda field: -field.priority)
    for field in (one for one in ranked if one.priority > FIGURES):
        if fits(kept):
            return kept
        kept.remove(field)
    for field in (one for one in ranked if one.short and WHOLE < one.priority <= FIGURES):
        if fits(kept):
            return kept
        kept[kept.index(field)] = replace(field, text=field.short)
    while not fits(kept) and (least := max(kept, key=lambda field: field.priority)).priority > ALWAYS:
        kept.remove(least)
    if not fits(kept):
        kept = [replace(one, text=one.short) if one.priority == WHOLE and one.short else one for one in kept]
    return kept


def state_field(store: Store) -> StatusField:
    """The first field: the state word and the headline of the diagnosis, with the more severe of their two levels."""
    word, level = status_word(store)
    found = diagnosis(store)
    if not found.headline:
        return StatusField(word, ALWAYS, level)
    both = word if found.headline == word else f"{word} · {found.headline}"
    # For a live run the headline is enough; in any other state, the state word says what the screen shows.
    short = found.headline if word == LinkState.LIVE.value else ""
    return StatusField(both, ALWAYS, max(level, found.level, key=GRAVITY.index), short)


def status_word(store: Store) -> tuple[str, Level]:
    """The word for the state of the run in the status line, such as ``STALE 12 s``, and its severity. The word is
    STALLED if the hub has raised the alert `stall` or ranks are lost.

    FROZEN takes precedence over all other words, because it says that the screen is not live.
    """
    if store.frozen_s is not None:
        return f"FROZEN {format.age(store.frozen_s)}", Level.WARN
    link = store.link
    if store.fault:
        return "DETACHED", Level.BAD
    if store.playback_position:
        return LinkState.PLAYBACK.value, Level.NOTE
    age = store.age_s
    if link is LinkState.STALE:
        return f"STALE {format.age(age)}" if age is not None else "STALE", Level.WARN
    if link is LinkState.LIVE and store.behind_s > BEHIND_AFTER_S:
        return "CATCHING UP", Level.WARN
    if link is LinkState.LIVE and paused(store):
        return "PAUSED", Level.WARN
    if link is LinkState.LIVE and any(gone.process == "restarting" for gone in store.state.gone.values()):
        return "RESTARTING", Level.WARN
    if link is LinkState.LIVE and (alerted(store, "stall") or len(store.not_lost) < len(store.state.hellos)):
        return "STALLED", Level.BAD
    if link is LinkState.LIVE and store.step is None:
        return link.value, Level.NOTE  # nothing is known yet, for example after a restart of the hub
    return link.value, _LINK_LEVEL[link]


def status_fields(store: Store, operator: bool | None) -> Iterator[StatusField]:
    """The fields of the status line, from left to right. `operator`: whether this client is an operator (True) or a
    viewer (False); with None, the line does not show the role.
    """
    summary = store.summary
    if store.simulated:
        yield StatusField(simulated_text(store), WHOLE, Level.WARN, SIMULATED[:3])
    yield StatusField(store.run, 5, short=shortened(store.run))
    # Panels show the number of the newest step; this is the number of steps done.
    done, planned = store.steps_done, store.steps_planned
    goal = f"/{format.grouped(planned)}" if planned else ""
    steps = f"{format.grouped(done).rjust(len(goal) - 1)}{goal}"
    yield StatusField(f"{steps} steps", 0, short=steps if goal else "")
    if summary:
        step_time = format.duration_ms(summary.step_ms)
        yield StatusField(f"{step_time}/step", 2, short=step_time)
        if summary.tokens_per_s is not None:
            yield StatusField(f"{format.si(summary.tokens_per_s):>6} tok/s", 7)
        if summary.mfu is not None:
            yield StatusField(f"{format.percent(summary.mfu)} MFU", 6)
        if summary.loss is not None:
            yield StatusField(f"loss {summary.loss:.3f}", 4, Level.BAD if not_finite(summary) else None)
        if store.trial:
            progress = trial_progress(store.trial)
            text = f"trial {trial_changes(store.trial)} ({progress})"
            yield StatusField(text, 4, Level.WARN, f"trial {progress}")
        if summary.bubble is not None:
            bound = f" (bound {format.percent(summary.bubble_bound).strip()})" if summary.bubble_bound else ""
            yield StatusField(f"bubble {format.percent(summary.bubble)}{bound}", 9)
    if store.link is not LinkState.ENDED:
        counted = store.reporting if store.rank_records else store.present
        whole = len(counted) == store.world
        what = "ranks" if store.rank_records else "ranks joined"
        short = store.coverage() if store.rank_records else ""
        yield StatusField(f"{store.coverage()} {what}", 3, None if whole else Level.WARN, short)
    if operator is not None and not store.playback_position:
        yield StatusField("OPERATOR" if operator else "VIEWER", 8)
    if store.live and store.live.step != store.step:
        yield StatusField(f"the run is at step {format.grouped(store.live.step)}", 3, Level.WARN)
    elif store.link is LinkState.LIVE and store.age_s is not None:
        yield StatusField(f"{format.age(store.age_s)} old", 10)


def shortened(name: str) -> str:
    """The beginning of a long name; "" if the name is short."""
    return f"{name[: NAME_CHARS - 1]}…" if len(name) > NAME_CHARS else ""


def simulated_text(store: Store) -> str:
    """The label of a simulated run, with its speed unless it runs in real time, such as ``SIMULATED x10``."""
    speed = store.fact("speed")
    timed = isinstance(speed, int | float) and speed != 1
    return f"{SIMULATED} x{speed:g}" if timed else SIMULATED
