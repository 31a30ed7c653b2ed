"""A run as it was recorded, for commands that look at a place of it. Textual-free."""

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
from cockpit.data.connection import CockpitError, Connection, runs_dir
from cockpit.data.store import Playing, Store

AT = "a step such as 120, or an update such as seq:4500 or EPOCH:4500"
_AT = re.compile(r"(?:(?P<epoch>\w+):)?(?P<number>\d{1,15})")


def folder_of(run: str | None) -> Path:
    """The folder of a run, by name or folder; the newest live one, else the one touched last, if none is named."""
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
    folder = folder_of(run)
    try:
        check_readable(folder)
        return Recording(folder / RECORD_FILE)
    except (RunError, RecordingError) as error:
        raise CockpitError(str(error)) from None


def is_over(run: str | None) -> bool:
    """Whether `run` names a folder that no hub serves: then its recording is all there is to ask."""
    if run is None or "://" in run:
        return False
    try:
        resolve(run, runs_dir())
    except ElsewhereError:
        return False
    except RunError:
        return commands_file(folder_of(run)).exists() or (folder_of(run) / RECORD_FILE).exists()
    return False


def place(recording: Recording, at: str | None) -> Position:
    """Where `at` is (see `AT`); the end for None. CockpitError: the recording holds no such place."""
    if at is None:
        return recording.at_end()
    asked = _AT.fullmatch(at)
    if asked is None:
        raise CockpitError(f"there is no place {at[:40]!r} in a recording; legal: {AT}")
    epoch, number = asked["epoch"], int(asked["number"])
    try:
        if epoch is None:
            return recording.at_step(number)
        return recording.at_seq(number, None if epoch == "seq" else epoch)
    except RecordingError as error:
        raise CockpitError(str(error)) from None


UNENDED = "its hub was killed, or the end of the file is lost"


class Past:
    """A place in the recording of a run, with a store of how the run was there."""

    def __init__(self, run: str | None, at: str | None = None) -> None:
        self.note = ""
        self.recording = open_recording(run)
        try:
            self.replay = Replay(self.recording)
            self.replay.seek(place(self.recording, at))
            span = self.recording.span()
        except RecordingError as error:
            self.recording.close()
            raise CockpitError(str(error)) from None
        self.store = Store(lambda: self.replay.time_s)
        self.store.adopt(self.replay.state)
        self.missing = list(self.recording.damage)
        if at is None and any(rank not in self.store.state.gone for rank in self.store.state.hellos):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(span.last_s))
            self.note = f"{when} is the end of the recording, and not of the run: {UNENDED}"
        if at is not None:
            self.store.playing = playing(self.replay, span.first_s, span.last_s)

    @property
    def seq(self) -> int:
        return self.replay.seq

    @property
    def epoch(self) -> str:
        return self.replay.epoch

    def close(self) -> None:
        self.recording.close()


@dataclass(frozen=True)
class Picture:
    """A run at one moment: now, or as it was recorded."""

    store: Store
    epoch: str
    seq: int
    missing: list[str] = field(default_factory=list)  # of the recording: what cannot be read, a sentence each
    note: str = ""  # what one should know of it besides


def story(run: str | None) -> Picture:
    """What happened in a run that is over: as recorded, and every command; those are there even if it was not."""
    try:
        picture = look(run)
    except CockpitError as error:
        folder = folder_of(run)
        unrecorded = not (folder / RECORD_FILE).exists()
        note = f"events of this run are not known: {error}"
        picture = Picture(
            Store(time.monotonic), "", 0, [] if unrecorded else [note], note if unrecorded else ""
        )
    store = picture.store
    journalled = read_commands(commands_file(folder_of(run)))
    commands, trials = store.state.commands, store.state.trials
    for command in (entry.state for entry in journalled.commands):
        if command.id not in commands or _command_reached(command) > _command_reached(commands[command.id]):
            store.apply([command])
    for trial in (entry.state for entry in journalled.trials):
        if trial.id not in trials or _trial_reached(trial) > _trial_reached(trials[trial.id]):
            store.apply([trial])
    why = "the hub was killed before this was decided"
    store.apply([structs.replace(one, why=why) for one in commands.values() if one.state == "accepted"])
    store.apply([structs.replace(one, why=why) for one in trials.values() if not one.settled])
    return replace(picture, missing=[*picture.missing, *journalled.damage])


# Of the recording and the journal of a hub that was killed, one is behind: how far each has come.


def _command_reached(command: CommandState) -> tuple[int, int, bool]:
    stage = {"accepted": 0, "rolled_back": 2}.get(command.state, 1)
    return stage, command.acks + command.failed, bool(command.why)


def _trial_reached(trial: TrialState) -> tuple[int, int]:
    stages = ("before", "applying", "after", "reverting")
    return stages.index(trial.state) if trial.state in stages else len(stages), trial.measured


def playing(
    replay: Replay, first_s: float, last_s: float, speed: float = 1.0, paused: bool = True
) -> Playing:
    return Playing(replay.time_s, first_s, last_s, speed, paused, replay.thinned)


def look(run: str | None, at: str | None = None) -> Picture:
    """The run as its hub knows it now; from its recording if it is over, or if a place `at` is named."""
    if at is not None or is_over(run):
        past = Past(run, at)
        past.close()
        return Picture(past.store, past.epoch, past.seq, past.missing, past.note)
    watch = Connection(run)
    try:
        watch.until_known()
    finally:
        watch.close()
    return Picture(watch.store, watch.client.epoch, watch.client.seq)
