"""The cockpit without a screen: one function a command. Each returns the exit status."""

import time
from collections.abc import Mapping, Sequence

from agents.protocol import CommandState, KnobState, Summary, Value
from agents.recording.format import RecordingError
from agents.waiting import wait_for_command
from cockpit.data import format, plain
from cockpit.data.connection import CockpitError, Connection
from cockpit.data.diagnosis import LOST, diagnosis
from cockpit.data.metrics import OWN_TIME, STEP_TIME, read
from cockpit.data.run_log import log_entries
from cockpit.data.sources.recorded import is_over, look, open_recording, story
from cockpit.data.status import status_fields, status_word
from cockpit.data.store import LinkState, Store
from cockpit.knobs.values import actions, effect_text, fit, held, legal_text, only, split_change, value_text
from cockpit.printing import complain, say_json, tell_missing
from cockpit.printing import say as _say
from cockpit.printing import table as _table

REFUSED = 3
SILENT_S = 30.0  # a watcher gives up


def snapshot(run: str | None, at: str | None, as_json: bool) -> int:
    picture = look(run, at)
    store = picture.store
    if as_json:
        say_json(plain.snapshot(store, picture.epoch, picture.seq) | {"missing": picture.missing})
        return tell_missing(picture.missing, picture.note)
    word, level = status_word(store)
    _say(
        " · ".join(
            [f"{level.value} {word}", *(item.text.strip() for item in status_fields(store, operator=False))]
        )
    )
    said = diagnosis(store)
    _say(f"{said.level.value} {said.text}")
    readings, own = read(store, STEP_TIME), read(store, OWN_TIME)
    rows = [["rank", "at", "host", "step", "ms", "own ms", "doing"]]
    for rank, hello in sorted(store.state.hellos.items()):
        step, pulse = store.state.steps.get(rank), store.state.pulses.get(rank)
        gone = store.state.gone.get(rank)
        doing = format.clean(pulse.doing) if pulse else format.MISSING
        if gone:
            doing = "gone" if gone.over else LOST[gone.process]
        rows.append(
            [
                str(rank),
                format.coords(hello.coords),
                format.clean(hello.host),
                format.grouped(step.step if step else None),
                format.fixed(readings[rank].value, 6),
                format.fixed(own[rank].value, 6),
                doing,
            ]
        )
    _table(rows, right=frozenset({0, 3, 4, 5}))
    return tell_missing(picture.missing, picture.note)


def watch(run: str | None, as_json: bool, low_bandwidth: bool = False) -> int:
    """Follow until the run is over; one that is over already is told from its recording."""
    if is_over(run):
        return _watch_again(run, as_json)
    following = Connection(run, low_bandwidth=low_bandwidth)
    last = -1
    try:
        if as_json and not low_bandwidth:
            following.client.look("experts", "timeline", "peers")
        following.until_known()
        first = True
        while True:
            anew = first or following.poll()
            store = following.store
            if as_json:
                if anew:
                    say_json({"kind": "snapshot", **plain.snapshot(store, *_place(following))})
                else:
                    for message in following.last:
                        say_json(plain.update(message))
            else:
                for summary in store.state.summaries if not first else store.state.summaries[-1:]:
                    if summary.step > last:
                        last = summary.step
                        _say(_summary_line(summary))
            first = False
            if store.link in (LinkState.ENDED, LinkState.FAILED):
                return 0 if store.link is LinkState.ENDED else 1
            if (store.age_s or 0.0) > SILENT_S:
                raise CockpitError(f"the hub has not been heard for {format.age(store.age_s or 0.0)}")
    finally:
        following.close()


def _watch_again(run: str | None, as_json: bool) -> int:
    recording = open_recording(run)
    store = Store(lambda: 0.0)
    told = ("", 0)
    try:
        for moment in recording.moments():
            anew = moment.snapshot is not None and (moment.epoch, moment.seq) != told
            if anew:
                store.rebuild(moment.snapshot or ())
            if moment.update is not None:
                store.apply([moment.update])
            told = moment.epoch, moment.seq
            if as_json and anew:
                say_json({"kind": "snapshot", **plain.snapshot(store, *told)})
            elif as_json and moment.update is not None:
                say_json(plain.update(moment.update))
            elif isinstance(moment.update, Summary):
                _say(_summary_line(moment.update))
    except RecordingError as error:
        raise CockpitError(str(error)) from None
    finally:
        recording.close()
    return tell_missing(recording.damage) or (1 if store.link is LinkState.FAILED else 0)


def _place(following: Connection) -> tuple[str, int]:
    return following.client.epoch, following.client.seq


def _summary_line(summary: Summary) -> str:
    bubble = f"  bubble {format.percent(summary.bubble)}" if summary.bubble is not None else ""
    return (
        f"step {summary.step:>7}  loss {format.fixed(summary.loss, 8, 4)}  {format.duration_ms(summary.step_ms)}"
        f"  {format.si(summary.tokens_per_s):>8} tok/s{bubble}"
    )


def knobs(run: str | None, as_json: bool) -> int:
    picture = look(run)
    board = picture.store.state.board
    status = tell_missing(picture.missing, picture.note)
    if board is None:
        raise CockpitError("no rank of this run has shown its knobs")
    if as_json:
        say_json(plain.knobs(picture.store))
        return status
    rows = [["knob", "value", "legal", "effect", "about"]]
    rows += [
        [knob.name, value_text(knob), legal_text(knob), effect_text(knob), knob.about]
        for knob in (*held(board), *actions(board))
    ]
    _table(rows)
    _say(f"revision {board.revision}")
    return status


def _overdue(known: CommandState | None, why: str, as_json: bool) -> int:
    """The wait is over, the change is not: one that no rank has applied stays in the queue."""
    waits = known is None or known.state == "accepted"
    complain(f"{why}; it stays in the queue and may still be applied" if waits else why)
    if as_json:
        state, revision = (known.state, known.revision) if known else ("unknown", 0)
        say_json({"state": state, "revision": revision, "why": why})
    return 1


def _changes(words: Sequence[str], board: Mapping[str, KnobState]) -> dict[str, Value]:
    """``knob=value`` each, or an action's bare name; CockpitError if one is not, or is given twice."""
    changes: dict[str, Value] = {}
    for word in words:
        do = only(board[word]) if word in board else None
        if do is None and word in board and board[word].action:
            ways = ", ".join(f"{word}={value}" for value in board[word].legal.choices)
            raise CockpitError(f"{word} can be done in several ways; legal: {ways}")
        try:
            name, value = split_change(word) if do is None else (word, do)
        except ValueError as error:
            raise CockpitError(str(error)) from None
        if name in changes:
            raise CockpitError(f"{name} is given twice; name each knob once")
        changes[name] = fit(board[name], value) if name in board else value
    return changes


def steer(run: str | None, words: Sequence[str], operator: bool = True) -> Connection:
    """A watch for who will ask for changes (`operator`), or what they would do; if the run starts, without a board."""
    if words and all("=" in word for word in words):
        _changes(words, {})  # refused before a run is looked for
    watch = Connection(run, operator)
    try:
        watch.until_known()
    except CockpitError:
        if not watch.answered:
            watch.close()
            raise
    return watch


def wanted(watch: Connection, words: Sequence[str]) -> dict[str, Value]:
    """What the words ask for, in terms of the run's board."""
    board = watch.store.state.board
    return _changes(words, {knob.name: knob for knob in board.knobs} if board else {})


def change(
    run: str | None, words: Sequence[str], wait: bool, timeout_s: float, as_json: bool, reason: str = ""
) -> int:
    """Propose; the hub and the ranks judge. `wait` for the last rank, else for the hub's answer."""
    watch = steer(run, words)
    try:
        try:
            asked = watch.client.propose(wanted(watch, words), reason=reason)
        except ValueError as error:
            raise CockpitError(str(error)) from None
        return answer(watch, asked, wait, timeout_s, as_json)
    finally:
        watch.close()


def answer(watch: Connection, asked: str, wait: bool, timeout_s: float, as_json: bool) -> int:
    """What became of the proposal `asked`."""
    try:
        command = wait_for_command(watch.client, asked, timeout_s, settled=wait)
    except TimeoutError as error:
        return _overdue(watch.client.state.commands.get(asked), str(error), as_json)
    verdict = plain.verdict(command)
    refused = command.state in plain.REFUSALS
    partial = command.state == "applied" and not command.settled and (wait or command.failed > 0)
    undone = command.state == "applied" and command.settled and bool(command.why)  # of what it asked for
    if as_json:
        say_json(verdict)
    elif refused:
        _say(f"✗ {command.state}: {command.why}")
    elif command.state == "applied":
        at = format.grouped(command.applied_step)
        why = f": {command.why}" if (partial or undone) and command.why else ""
        sign = "✗" if partial or undone else "✓"
        _say(f"{sign} applied {command.acks}/{command.world} at step {at} · revision {command.revision}{why}")
    else:
        why = f": {command.why}" if command.why else ""
        _say(f"· accepted as revision {command.revision}{why}")
    return REFUSED if refused or partial or undone else 0


def log(run: str | None, as_json: bool) -> int:
    """Events and commands: of a live run from its hub, of one that has ended from its folder."""
    picture = story(run) if is_over(run) else look(run)
    store = picture.store
    status = tell_missing(picture.missing, picture.note)
    if as_json:
        for text in picture.missing:
            say_json(plain.plain_entry(None, "error", "recording", text))
        for record in plain.log(store):
            say_json(record)
        return status
    for entry in log_entries(store):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
        _say(f"{stamp}  {entry.level:<7}  {entry.text} · {entry.source}")
    return status
