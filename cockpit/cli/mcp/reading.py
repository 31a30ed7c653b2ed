"""MCP tools that read a run. Each tool except `list_runs` returns a record with the name of the run, the age of the
data, and how many ranks report."""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.state.metric_curves import Curve, Point, Series
from agents.waiting import RunOverError, wait_for_trial
from cockpit.cli.mcp.bounds import bounded
from cockpit.cli.mcp.changes import Changes, words_of
from cockpit.cli.mcp.session import Session
from cockpit.cli.show.headless import chosen_filter
from cockpit.cli.steer.advise import as_plain, shown_advice
from cockpit.cli.steer.steering import ANSWER_S, ask_preview, plain_answer
from cockpit.data import plain
from cockpit.data.curves.job_metrics import BY_KEY
from cockpit.data.curves.segments import segments
from cockpit.data.filter import matching
from cockpit.data.run_folders.run_list import RunLister, plain_run
from cockpit.data.sources.connection import CockpitError, Connection, runs_dir
from cockpit.data.sources.recorded import RunSnapshot, load_snapshot, open_recording, run_history
from cockpit.data.store import Store

Metric = Literal[
    "loss",
    "grad_norm",
    "step_ms",
    "tokens_per_s",
    "lr",
    "bubble",
    "mfu",
    "load_max_over_mean",
    "dropped",
    "a2a_bytes",
    "validation_loss",
    "replica_bytes",
    "loss_scale",
    "skipped_steps",
]
StepNumber = Annotated[int, Field(ge=0, le=2**53)]
Limit = Annotated[int, Field(ge=1, le=256)]
WATCH_POLL_S = 0.1
WATCHED = 16  # maximum number of steps that `watch` returns


Wait = Annotated[float, Field(gt=0, le=600, description="seconds to wait for the outcome")]


def stamp(store: Store) -> dict[str, Any]:
    """The fields of a tool's result that say which run it describes, how old its data is, and how many ranks report."""
    whole = plain.overview(store)
    about = {name: whole[name] for name in ("simulated", "link", "age_s", "step", "coverage")}
    return {"run": store.run_name, **about}


class ReadingTools:
    """The tools that read a run; an MCP client receives each method's docstring as the description of the tool."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list_runs(self, limit: Limit = 32) -> dict[str, Any]:
        """List the runs in the runs folder, live ones first. All other tools work on one run only, named in
        `this_server`."""
        try:
            found = RunLister(runs_dir()).runs()
        except OSError as error:
            raise CockpitError(f"the folder of runs cannot be read: {error.strerror}") from None
        now_s = time.time()
        record = {"runs": [plain_run(one, now_s) for one in found[:limit]], "total": len(found)}
        return bounded({"this_server": self._session.run, **record})

    def status(self) -> dict[str, Any]:
        """State of the run: link (live, stale, ended, ...), diagnosis, newest step with its metrics, and how many ranks
        report. age_s: seconds since the hub was last heard from; a missing value is null, never zero."""
        with self._session.view() as view:
            return bounded(plain.overview(view.store) | _missing(view))

    def watch(self, seconds: Annotated[float, Field(gt=0, le=30)] = 5.0) -> dict[str, Any]:
        """Watch the run for some seconds. Returns the steps that ended in this time, and the status after it."""
        with self._session.view() as view:
            summaries = view.store.state.summaries
            last = summaries[-1].step if summaries else -1
        until = time.monotonic() + seconds
        over = False
        while not over and time.monotonic() < until:
            time.sleep(min(WATCH_POLL_S, seconds))
            over = self._session.over
        with self._session.view() as view:
            steps = [plain.plain(one) for one in view.store.state.summaries if one.step > last]
            record = {"steps": steps[-WATCHED:], "steps_ended": len(steps), "watched_s": seconds}
            return bounded(plain.overview(view.store) | record)

    def ranks(
        self, filter: Annotated[str, Field(max_length=200)] | None = None, limit: Limit = 16
    ) -> dict[str, Any]:
        """The newest records of the ranks, lowest ranks first; with a filter such as "pp=1 & own_ms > 1.2 * median",
        only of the ranks that match. own_ms: step time without waiting for other ranks."""
        with self._session.view() as view:
            chosen = chosen_filter(view.store, filter)
            among = (
                sorted(view.store.state.hellos)
                if chosen is None
                else sorted(matching(view.store, chosen) or ())
            )
            rows = plain.ranks(view.store, among[:limit])
            return bounded(stamp(view.store) | {"matching": len(among), "shown": len(rows), "ranks": rows})

    def metric(
        self,
        metric: Metric,
        first_step: StepNumber = 0,
        last_step: StepNumber | None = None,
        most_points: Annotated[int, Field(ge=8, le=1000)] = 200,
    ) -> dict[str, Any]:
        """A metric of the whole job over a range of recorded steps, as [step, value] pairs. If the range has more steps
        than `most_points`, each bucket of `width` steps is reduced to its first, lowest, highest and last value."""
        with self._session.view() as view:
            state, head = view.store.state, stamp(view.store)
            newest = state.summaries[-1].step if state.summaries else 0
            epoch, seq = view.epoch, view.seq
            last = newest if last_step is None else last_step
            if last < first_step:
                raise CockpitError(f"last_step {last} is before first_step {first_step}")
        detail = self._recorded(first_step, last, epoch, seq)
        with self._session.view() as view:
            found = segments(view.store.state, metric, (first_step, last), detail)
        points = [point for one in found for point in one.points]
        width = max((one.width for one in found), default=1)
        shown, width = _thinned(points, width, most_points)
        about = BY_KEY[metric]
        return bounded(
            head
            | {
                "metric": metric,
                "unit": {"ms": "ms", "B": "bytes", "tok/s": "tokens/s"}.get(about.unit, "1"),
                "about": about.about,
                "first_step": first_step,
                "last_step": last,
                "values_known": len(points),
                "width": width,
                "points": [list(point) for point in shown],
            }
        )

    def _recorded(self, first: int, last: int, epoch: str, seq: int) -> Curve | None:
        """The curve from `first` to `last` with every step, read from the recording; None if the recording is not on
        this machine."""
        try:
            recording = open_recording(self._session.run)
        except CockpitError:
            return None
        try:
            return curve_between(recording, first, last, epoch, seq)
        except RecordingError:
            return None
        finally:
            recording.close()

    def at_step(self, step: StepNumber) -> dict[str, Any]:
        """The whole recorded state of the run at the end of a step: metrics, knobs, ranks, experts, alerts."""
        loaded = load_snapshot(self._session.chosen(), str(step))
        return bounded(plain.snapshot(loaded.store, loaded.epoch, loaded.seq) | _missing(loaded))

    def diagnosis(self) -> dict[str, Any]:
        """What limits the run or is wrong with it, with the evidence, and all active alerts, worst first."""
        with self._session.view() as view:
            whole = plain.overview(view.store)
            record = {"state": whole["state"], "diagnosis": whole["diagnosis"]}
            return bounded(stamp(view.store) | record | {"alerts": plain.alerts(view.store)})

    def log(self, limit: Limit = 50) -> dict[str, Any]:
        """The newest lines of the run's log, newest first: events, alerts, and every change with who made it, why, the
        old values and the outcome."""
        with self._session.view() as view:
            lines, head = list(plain.log(view.store)), stamp(view.store)
        if self._session.over:  # the journal has every command, the recording perhaps not
            lines = list(plain.log(run_history(self._session.run).store))
        newest = list(islice(reversed(lines), limit))
        return bounded(head | {"lines": newest, "total": len(lines)})

    def settings(self) -> dict[str, Any]:
        """The knobs and actions with their values and legal values, and the facts of the run (its layout, its size)."""
        with self._session.view() as view:
            hello = next(iter(view.store.state.hellos.values()), None)
            facts = {"facts": hello.facts if hello else {}}
            return bounded(stamp(view.store) | plain.knobs(view.store) | facts)

    def advise(self) -> dict[str, Any]:
        """What bounds the run's step time, and the changes that would make steps faster, ranked by predicted gain."""
        with self._session.requesting() as connection:
            found = shown_advice(connection)
            return bounded(stamp(connection.store) | as_plain(found))

    def preview(self, changes: Changes) -> dict[str, Any]:
        """The predicted effect of knob changes; nothing is changed. Each estimate has an interval and a source, and
        says how many earlier previews of its quantity were checked, and in how many of them the interval contained the
        measured value. `why` says why the changes are not legal or why there are no estimates."""
        words = words_of(changes)
        with self._session.requesting(words) as connection:
            answer, trusts = ask_preview(connection, words)
            return bounded(stamp(connection.store) | plain_answer(answer, trusts))

    def trial(self, wait_s: Wait = 45.0) -> dict[str, Any]:
        """The newest trial of a knob; waits at most wait_s seconds for the trial to end."""
        with self._session.requesting() as connection:
            trials = list(connection.client.state.trials.values())
            if not trials:
                raise CockpitError("this run had no trial")
            return trial_outcome(connection, trials[-1].id, wait_s)


def trial_outcome(connection: Connection, id: str, wait_s: float) -> dict[str, Any]:
    """Wait at most `wait_s` seconds for the trial to end, and return it; if it has not ended, `pending` says so."""
    client, began = connection.client, time.monotonic()
    while id not in client.state.trials:
        connection.poll(0.05)
        if id in client.denied:
            raise CockpitError(client.denied[id])
        if time.monotonic() - began > ANSWER_S:
            raise CockpitError(f"the hub did not answer within {ANSWER_S:g} s")
    pending = ""
    try:
        trial = wait_for_trial(client, id, wait_s)
    except TimeoutError as error:
        trial, pending = client.state.trials[id], str(error)
    except RunOverError as error:
        raise CockpitError(str(error)) from None
    record = plain.plain(trial) | ({"pending": f"{pending}; the trial continues"} if pending else {})
    return bounded(stamp(connection.store) | record)


def _missing(view: RunSnapshot) -> dict[str, Any]:
    return {"missing": view.missing} if view.missing else {}


def _thinned(points: Sequence[Point], width: int, most: int) -> tuple[list[Point], int]:
    """Merge `points` into wider buckets until at most `most` remain. Returns the merged points, and the width of a
    bucket in steps."""
    series = Series()
    series.insert([step for step, _ in points], [value for _, value in points])
    while len(series.steps) > most:
        width *= 2
        series.thin(width)
    return list(zip(series.steps, series.values, strict=True)), width
