"""Commands that print information about a run instead of showing a screen: snapshot, watch, knobs, log. Each function
returns the exit status."""

import time
from collections.abc import Collection

from agents.protocol import Record, Summary, Update
from agents.recording.format import RecordingError
from agents.state.run_state import missing_steps
from cockpit.cli.exit_status import DONE, FAILED
from cockpit.data import format, plain
from cockpit.data.diagnosis.diagnosis import LOST, Level, diagnosis
from cockpit.data.diagnosis.status import SIMULATED, state_field, status_fields
from cockpit.data.filter import Filter, FilterError, count_text, matches, matching, parse, vocabulary
from cockpit.data.link import LinkState
from cockpit.data.log.run_log import log_entries
from cockpit.data.metrics import OWN_TIME, STEP_TIME, read
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.data.sources.recorded import is_over, load_snapshot, open_recording, run_history
from cockpit.data.store import Store
from cockpit.knobs.values import actions, effect_text, legal_text, text_knobs, value_knobs, value_text
from cockpit.printing import print_json, print_line, print_table, report_missing, run_mark

SILENT_S = 30.0  # `watch` ends after this long without a message from the hub


def snapshot(run: str | None, at: str | None, as_json: bool, filter_text: str | None = None) -> int:
    """Print the state of a run, as it is now or as it was at a point of its recording. With a filter, print only the
    ranks that match it."""
    loaded = load_snapshot(run, at)
    store = loaded.store
    chosen = chosen_filter(store, filter_text)
    if as_json:
        gaps = [text for text in missing_steps(store.state.events) if text not in loaded.missing]
        missing = {"missing": [*loaded.missing, *gaps]}
        print_json(plain.snapshot(store, loaded.epoch, loaded.seq, chosen) | missing)
        return report_missing(loaded.missing, loaded.note)
    state = state_field(store)
    fields = [field.text.strip() for field in status_fields(store, operator=None)]
    level = state.level or Level.NOTE
    print_line(" · ".join([f"{level.value} {state.text}", *fields]))
    found = diagnosis(store)
    print_line(f"{found.level.value} {found.sentence}")
    if chosen:
        print_line(f"/ {chosen.text}: {count_text(store, matches(store, chosen))}")
    print_table(_rank_rows(store, matching(store, chosen)), right=frozenset({0, 3, 4, 5}))
    return report_missing(loaded.missing, loaded.note)


def chosen_filter(store: Store, text: str | None) -> Filter | None:
    """Parse the filter `text`; None means all ranks. Raises CockpitError if `text` is not a valid filter."""
    if text is None:
        return None
    try:
        return parse(text, vocabulary(store))
    except FilterError as error:
        raise CockpitError(f"--filter: {error}") from None


def _rank_rows(store: Store, among: Collection[int] | None) -> list[list[str]]:
    step_times, own_times = read(store, STEP_TIME), read(store, OWN_TIME)
    rows = [["rank", "at", "host", "step", "ms", "own ms", "doing"]]
    for rank, hello in sorted(store.state.hellos.items()):
        step, pulse = store.state.steps.get(rank), store.state.pulses.get(rank)
        if among is not None and rank not in among:
            continue
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
                format.fixed(step_times[rank].value, 6),
                format.fixed(own_times[rank].value, 6),
                doing,
            ]
        )
    return rows


def watch(run: str | None, as_json: bool, low_bandwidth: bool = False, filter_text: str | None = None) -> int:
    """Follow a run until it is over. If the run is already over, print its recording. With a filter, print a rank's
    records only while the rank's newest step matches the filter."""
    if filter_text is not None and (low_bandwidth or not as_json):
        raise CockpitError("--filter needs --json and the records of ranks, which --low-bandwidth omits")
    if is_over(run):
        return _watch_recording(run, as_json, filter_text)
    with Connection(run, low_bandwidth=low_bandwidth) as connection:
        if as_json and not low_bandwidth:
            connection.client.request_samples("experts", "timeline", "peers")
        connection.wait_for_snapshot()
        store, last, first = connection.store, -1, True
        chosen = chosen_filter(store, filter_text)
        while True:
            rebuilt = first or connection.poll()
            if as_json:
                _print_updates(connection, rebuilt, chosen)
            else:
                for summary in store.state.summaries if not first else store.state.summaries[-1:]:
                    if summary.step > last:
                        last = summary.step
                        print_line(_summary_line(summary, store))
            first = False
            if store.link in (LinkState.ENDED, LinkState.FAILED):
                return DONE if store.link is LinkState.ENDED else FAILED
            if (store.age_s or 0.0) > SILENT_S:
                raise CockpitError(f"no message from the hub for {format.age(store.age_s or 0.0)}")


def _print_updates(connection: Connection, rebuilt: bool, chosen: Filter | None) -> None:
    if rebuilt:
        client = connection.client
        record = plain.snapshot(connection.store, client.epoch, client.seq, chosen)
        print_json({"kind": "snapshot", **record})
    else:
        among = matching(connection.store, chosen)
        for message in connection.last:
            _print_update(message, connection.store, among)


def _print_update(message: Update, store: Store, among: Collection[int] | None) -> None:
    """Print an update. If `among` is not None, skip the records of ranks that are not in `among`."""
    if among is None or not isinstance(message, Record) or message.rank in among:
        print_json(plain.marked(plain.update(message), store))


def _watch_recording(run: str | None, as_json: bool, filter_text: str | None) -> int:
    recording = open_recording(run)
    store = Store(lambda: 0.0)
    chosen = None if filter_text is None else chosen_filter(load_snapshot(run).store, filter_text)
    among: Collection[int] | None = None
    new_step = True  # whether a step has ended since the last evaluation, which reads all ranks
    position = ("", 0)
    try:
        for moment in recording.moments():
            rebuilt = moment.snapshot is not None and (moment.epoch, moment.seq) != position
            if rebuilt:
                store.rebuild(moment.snapshot or ())
            if moment.update is not None:
                store.apply([moment.update])
            position = moment.epoch, moment.seq
            if new_step and isinstance(moment.update, Record):
                among, new_step = matching(store, chosen), False
            new_step = new_step or rebuilt or isinstance(moment.update, Summary)
            if as_json and rebuilt:
                print_json({"kind": "snapshot", **plain.snapshot(store, *position, chosen)})
            elif as_json and moment.update is not None:
                _print_update(moment.update, store, among)
            elif isinstance(moment.update, Summary):
                print_line(_summary_line(moment.update, store))
    except RecordingError as error:
        raise CockpitError(str(error)) from None
    finally:
        recording.close()
    return report_missing(recording.damage) or (FAILED if store.link is LinkState.FAILED else DONE)


def _mark(store: Store) -> str:
    return f"  {SIMULATED}" if store.simulated else ""


def _summary_line(summary: Summary, store: Store) -> str:
    bubble = f"  bubble {format.percent(summary.bubble)}" if summary.bubble is not None else ""
    return (
        f"step {summary.step:>7}  loss {format.fixed(summary.loss, 8, 4)}  {format.duration_ms(summary.step_ms)}"
        f"  {format.si(summary.tokens_per_s):>8} tok/s{bubble}{_mark(store)}"
    )


def knobs(run: str | None, as_json: bool) -> int:
    """Print the knobs with their values and legal values."""
    loaded = load_snapshot(run)
    board = loaded.store.state.board
    status = report_missing(loaded.missing, loaded.note)
    if board is None:
        raise CockpitError("no rank of this run has published its knobs yet")
    if as_json:
        print_json(plain.answer(plain.knobs(loaded.store), loaded.store))
        return status
    rows = [["knob", "value", "legal", "effect", "about"]]
    rows += [
        [knob.name, value_text(knob), legal_text(knob), effect_text(knob), knob.about]
        for knob in (*value_knobs(board), *text_knobs(board), *actions(board))
    ]
    print_table(rows)
    print_line(f"revision {board.revision}{run_mark(loaded.store)}")
    return status


def log(run: str | None, as_json: bool) -> int:
    """Print events and commands of a run: from its hub if the run is live, else from its folder."""
    loaded = run_history(run) if is_over(run) else load_snapshot(run)
    store = loaded.store
    status = report_missing(loaded.missing, loaded.note)
    if as_json:
        for text in loaded.missing:
            print_json(plain.marked(plain.plain_entry(None, "error", "recording", text), store))
        for record in plain.log(store):
            print_json(plain.marked(record, store))
        return status
    for entry in log_entries(store):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
        print_line(f"{stamp}  {entry.level:<7}  {entry.headline} · {entry.source}{_mark(store)}")
    return status
