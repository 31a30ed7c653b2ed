"""Reads the state of a run at a position of its recording, for the subcommands of ``cockpit``."""

import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from agents.protocol import CommandState, TrialState
from agents.recording.commands import read_commands
from agents.recording.format import RecordingError
from agents.recording.reader import Position, Recording
from agents.recording.replay import Replay
from agents.rundir.hub_file import ElsewhereError, check_readable
from agents.rundir.runs import (
    RECORD_FILE,
    RunError,
    commands_file,
    find_folder,
    list_runs,
    newest_live,
    resolve,
)
from cockpit.data.link import PlaybackPosition
from cockpit.data.sources.connection import CockpitError, Connection, runs_dir
from cockpit.data.store import Store

AT = "a step such as 120, or an update such as seq:4500 or EPOCH:4500"
_AT = re.compile(r"(?:(?P<epoch>\w+):)?(?P<number>\d{1,15})")


def folder_of(run: str | None) -> Path:
    """The folder of a run, by name or path. None means the newest live run or, if no run is live, the newest run."""
    if run is not None:
        try:
            return find_folder(run, runs_dir())
        except RunError as error:
            raise CockpitError(str(error)) from None
    newest = newest_live(runs_dir()) or next(iter(list_runs(runs_dir())), None)
    if newest is None:
        raise CockpitError(f"there is no run in {runs_dir().absolute()}")
    return newest.folder


def open_recording(run: str | None) -> Recording:
    """Open the recording of the run that `folder_of` finds. Raises CockpitError if the recording does not exist or
    cannot be read."""
    folder = folder_of(run)
    try:
        check_readable(folder)
        return Recording(folder / RECORD_FILE)
    except (RunError, RecordingError) as error:
        raise CockpitError(str(error)) from None


def is_over(run: str | None) -> bool:
    """Whether `run` names the folder of a run that has no running hub, so that the run can only be read from its
    files."""
    if run is None or "://" in run:
        return False
    try:
        resolve(run, runs_dir())
    except ElsewhereError:
        return False
    except RunError:
        return commands_file(folder_of(run)).exists() or (folder_of(run) / RECORD_FILE).exists()
    return False


def find_position(recording: Recording, at: str | None) -> Position:
    """The position in the recording that `at` describes as text (`AT` lists the forms); None means the end. Raises
    CockpitError if there is no such position."""
    if at is None:
        return recording.at_end()
    match = _AT.fullmatch(at)
    if match is None:
        raise CockpitError(f"{at[:40]!r} is not a position in a recording; legal: {AT}")
    epoch, number = match["epoch"], int(match["number"])
    try:
        if epoch is None:
            return recording.at_step(number)
        return recording.at_seq(number, None if epoch == "seq" else epoch)
    except RecordingError as error:
        raise CockpitError(str(error)) from None


UNENDED = "the hub was killed, the disk was full, or the end of the file is lost"


class RecordedRun:
    """The recording of a run at one position, with a store that holds the state at that position."""

    def __init__(self, run: str | None, at: str | None = None) -> None:
        self.note = ""
        self.recording = open_recording(run)
        try:
            self.replay = Replay(self.recording)
            self.replay.seek(find_position(self.recording, at))
            span = self.recording.span()
        except RecordingError as error:
            self.recording.close()
            raise CockpitError(str(error)) from None
        self.store = Store(lambda: self.replay.time_s)
        self.store.folder = folder_of(run).resolve().name
        self.store.adopt(self.replay.state)
        self.missing = list(self.recording.damage)
        if at is None and any(rank not in self.store.state.gone for rank in self.store.state.hellos):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(span.last_s))
            self.note = f"the recording ends at {when}, before the end of the run: {UNENDED}"
        if at is not None:
            self.store.playback_position = playback_position(self.replay, span.first_s, span.last_s)

    @property
    def seq(self) -> int:
        return self.replay.seq

    @property
    def epoch(self) -> str:
        return self.replay.epoch

    def close(self) -> None:
        self.recording.close()


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run at one moment: now, or at a position of its recording."""

    store: Store
    epoch: str
    seq: int
    # parts of the recording that cannot be read, one sentence each
    missing: list[str] = field(default_factory=list)
    note: str = ""  # a remark for the user


def run_history(run: str | None) -> RunSnapshot:
    """The history of a finished run: events from its recording, and all commands and trials from its journal."""
    try:
        snapshot = load_snapshot(run)
    except CockpitError as error:
        folder = folder_of(run)
        unrecorded = not (folder / RECORD_FILE).exists()
        note = f"the events of this run cannot be read: {error}"
        snapshot = RunSnapshot(
            Store(time.monotonic), "", 0, [] if unrecorded else [note], note if unrecorded else ""
        )
    store = snapshot.store
    journal = read_commands(commands_file(folder_of(run)))
    commands, trials = store.state.commands, store.state.trials
    for command in (entry.state for entry in journal.commands):
        if command.id not in commands or _command_progress(command) > _command_progress(commands[command.id]):
            store.apply([command])
    for trial in (entry.state for entry in journal.trials):
        if trial.id not in trials or _trial_progress(trial) > _trial_progress(trials[trial.id]):
            store.apply([trial])
    why = "the hub was killed before the change or trial was decided"
    store.apply([structs.replace(one, why=why) for one in commands.values() if one.state == "accepted"])
    store.apply([structs.replace(one, why=why) for one in trials.values() if not one.settled])
    return replace(snapshot, missing=[*snapshot.missing, *journal.damage])


# When a hub is killed, its recording and its journal may end at different times. These functions tell which state of a
# command is newer.


def _command_progress(command: CommandState) -> tuple[int, int, bool]:
    stage = {"accepted": 0, "rolled_back": 2}.get(command.state, 1)
    return stage, command.acks + command.failed, bool(command.why)


def _trial_progress(trial: TrialState) -> tuple[int, int]:
    stages = ("before", "applying", "after", "reverting")
    return stages.index(trial.state) if trial.state in stages else len(stages), trial.measured


def playback_position(
    replay: Replay, first_s: float, last_s: float, speed: float = 1.0, paused: bool = True
) -> PlaybackPosition:
    """The position of `replay` as a `PlaybackPosition` for the store."""
    return PlaybackPosition(replay.time_s, first_s, last_s, speed, paused, replay.thinned)


def load_snapshot(run: str | None, at: str | None = None) -> RunSnapshot:
    """The state of a run: from its hub, or from its recording if the run is over or `at` names a position."""
    if at is not None or is_over(run):
        recorded = RecordedRun(run, at)
        recorded.close()
        return RunSnapshot(recorded.store, recorded.epoch, recorded.seq, recorded.missing, recorded.note)
    with Connection(run) as connection:
        connection.wait_for_snapshot()
    return RunSnapshot(connection.store, connection.client.epoch, connection.client.seq)
