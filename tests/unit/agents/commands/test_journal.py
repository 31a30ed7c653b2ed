"""Tests the journal, in which a hub stores the commands of a run, with a file that cannot be opened, is removed or
damaged, or was written by an earlier release."""

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agents.hub.commands.journal import Journal
from agents.protocol import CommandState, Event, Propose, TrialState
from agents.recording.commands import COLUMNS, SUMMED, Entry, TrialEntry, read_commands, row_of
from tests.unit.agents.control_harness import EIGHT, WORLD, ControlHarness

BESIDE = ("", "-wal", "-shm")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "journal_file.OPEN_S": 0.01,
        "journal.RETRY_S": 0.02,
        "journal.CHECK_S": 0.01,
    }.items():
        monkeypatch.setattr(f"agents.hub.commands.{name}", seconds)
    monkeypatch.setattr("agents.recording.database.BETWEEN_S", 0.0)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


def command(revision: int, **fields: object) -> Entry:
    known = {"id": f"c{revision}", "revision": revision, "changes": {"lr": 0.5}, "before": {"lr": 0.1}}
    known |= {"state": "applied", "who": "ada", "time_s": 5.0, "acks": 3, "world": 3}
    return Entry(CommandState(**{**known, **fields}))  # type: ignore[arg-type]


def states(path: Path) -> dict[str, str]:
    return {entry.state.id: entry.state.state for entry in read_commands(path).commands}


def test_a_journal_that_cannot_be_opened_is_retried(tmp_path: Path) -> None:
    journal = ControlHarness(tmp_path / "commands.db")
    journal.train()
    journal.propose("old", EIGHT)
    journal.ack(1, *range(WORLD))
    journal.propose("waits", {"micro_batches": 2})
    journal.journal.close()
    lock = sqlite3.connect(journal.path, isolation_level=None)
    lock.execute("PRAGMA locking_mode=EXCLUSIVE")
    lock.execute("BEGIN EXCLUSIVE")
    journal.start()
    journal.train()
    refused = journal.propose("early", {"micro_batches": 2})
    assert refused.state == "rejected" and "cannot be opened (database is locked)" in refused.why
    lock.close()
    until(journal.journal.take_reopened)
    journal.control.load_journal()
    assert [event.text for event in journal.journal.take_events()] == [
        f"the journal {journal.path} is open: changes are accepted again"
    ]
    known = journal.update_log.state.commands
    assert (known["old"].state, known["waits"].state) == ("applied", "accepted")
    after = journal.propose("after", {"micro_batches": 1})
    assert (after.state, after.revision) == ("accepted", 3), "no number is used twice"
    assert journal.propose("old", {"micro_batches": 1}) == known["old"], "no id either"
    journal.journal.close()


@pytest.mark.parametrize("removed", [BESIDE, BESIDE[:1], BESIDE[1:]])
def test_a_removed_journal_is_restored(tmp_path: Path, removed: tuple[str, ...]) -> None:
    journal = ControlHarness(tmp_path / "commands.db")
    journal.train()
    journal.propose("before", EIGHT)
    for beside in removed:
        journal.path.with_name(f"commands.db{beside}").unlink()
    said: list[str] = []
    until(lambda: said.extend(event.text for event in journal.journal.take_events()) or said)  # type: ignore[func-returns-value]
    assert said == [f"the journal {journal.path} was removed; it is restored with its whole content"]
    journal.propose("after", {"micro_batches": 2})
    killed = tmp_path / "killed"
    killed.mkdir()
    for beside in BESIDE[:2]:  # the files that remain after a hub is killed
        shutil.copy(journal.path.with_name(f"commands.db{beside}"), killed)
    assert states(killed / "commands.db") == {"before": "accepted", "after": "accepted"}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["commands.db", "commands.db-shm", "commands.db-wal", "killed"], (
        "and nothing else is left behind"
    )
    journal.journal.close()


def test_changes_are_refused_until_the_journal_is_restored(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    journal = ControlHarness(tmp_path / "run" / "commands.db")
    journal.train()
    journal.propose("before", EIGHT)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    told: list[Event] = []

    def tells(level: str) -> bool:
        told.extend(journal.journal.take_events())
        return bool(told) and told[-1].level == level

    until(lambda: tells("error"))
    refused = journal.propose("refused", {"micro_batches": 2})
    assert refused.state == "rejected" and "was removed and cannot be restored" in refused.why
    (tmp_path / "run").mkdir()
    until(lambda: tells("warning"))
    assert journal.propose("after", {"micro_batches": 2}).state == "accepted"
    told += journal.journal.take_events()
    assert [event.level for event in told] == ["error", "warning"], "each event is reported once"
    journal.journal.close()
    assert states(journal.path) == {"before": "accepted", "after": "accepted"}


def test_commands_of_an_earlier_release_are_imported(tmp_path: Path) -> None:
    earlier = tmp_path / "run.db"
    row = dict(zip(COLUMNS, row_of(command(7)), strict=True))
    row = {name: row[name] for name in SUMMED if name != "failed"}
    with sqlite3.connect(earlier) as db:
        db.execute(f"CREATE TABLE commands ({', '.join(row)}, PRIMARY KEY (id))")
        db.execute("CREATE TABLE trials (id TEXT PRIMARY KEY, began_s REAL NOT NULL, entry TEXT NOT NULL)")
        db.execute(f"INSERT INTO commands VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    assert states(earlier) == {"c7": "applied"}, "an old recording can still be read"
    journal = Journal(tmp_path / "commands.db", earlier)
    assert journal.found.last_revision == 7 and journal.found.entries == [command(7)]
    journal.update(command(8))
    journal.close()
    again = Journal(tmp_path / "commands.db", earlier)
    assert [entry.state.revision for entry in again.found.entries] == [7, 8], "once"
    again.close()


def test_a_flipped_bit_in_a_row_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "commands.db"
    journal = Journal(path)
    for revision in (1, 2):
        journal.insert(command(revision))
    journal.put_trial(TrialEntry(TrialState("t", "before", EIGHT, {}, 30, "ada", 1.0, True, 1.0)))
    journal.close()
    whole = read_commands(path)
    assert (len(whole.commands), len(whole.trials), whole.damage) == (2, 1, [])
    path.write_bytes(
        path.read_bytes().replace(b'{"lr":0.5}', b'{"lr":0.7}', 1).replace(b'"before"', b'"befose"')
    )
    damaged = read_commands(path)
    assert (len(damaged.commands), damaged.trials) == (1, [])
    assert damaged.damage == [f"{path} is damaged; commands and trials left out: 2"]


@pytest.mark.parametrize(
    ("name", "found", "sentence"),
    [
        ("commands", 1, "{} is damaged; missing commands: 1"),
        ("trials", 2, "{} is damaged; missing trials: 1"),
    ],
)
def test_a_row_that_only_the_index_has_is_reported(
    tmp_path: Path, name: str, found: int, sentence: str
) -> None:
    path = tmp_path / "commands.db"
    journal = Journal(path)
    for revision in (1, 2):
        journal.insert(command(revision))
    journal.put_trial(TrialEntry(TrialState("t", "before", EIGHT, {}, 30, "ada", 1.0, True, 1.0)))
    journal.close()
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        (count,) = db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size + 4] = count - 1  # the number of the page's rows
    path.write_bytes(data)
    damaged = read_commands(path)
    assert len(damaged.commands) == found and damaged.damage == [sentence.format(path)]
    again = Journal(path)
    assert any("; missing " in problem for problem in again.found.problems)
    again.close()


@pytest.mark.parametrize(
    ("place", "byte", "sentence"),
    [
        (b"tabletrialstrials", b"d", "malformed database schema"),
        (b"CREATE TABLE trials", b"\xc5", "the schema is damaged"),
        (None, b"\x00", "its tables are missing"),  # the number of rows of the schema
    ],
)
def test_a_damaged_schema_is_reported(
    tmp_path: Path, place: bytes | None, byte: bytes, sentence: str
) -> None:
    path = tmp_path / "commands.db"
    Journal(path).close()
    assert not read_commands(path).damage
    data = bytearray(path.read_bytes())
    at = 104 if place is None else data.index(place) + 4
    data[at : at + 1] = byte
    path.write_bytes(data)
    assert any(sentence in damage for damage in read_commands(path).damage)


def test_a_torn_or_damaged_log_is_detected_at_every_position(tmp_path: Path) -> None:
    """SQLite itself ignores all transactions after the damage and reports no error."""
    journal = Journal(tmp_path / "commands.db")
    for revision in range(1, 5):
        journal.insert(command(revision))
        journal.flush()
    copy = tmp_path / "copy"
    copy.mkdir()
    path, log = copy / "commands.db", copy / "commands.db-wal"
    whole = (tmp_path / "commands.db-wal").read_bytes()

    def damage(data: bytes) -> tuple[int, list[str]]:
        shutil.copy(tmp_path / "commands.db", path)
        (copy / "commands.db-shm").unlink(missing_ok=True)
        log.write_bytes(data)
        found = read_commands(path)
        return len(found.commands), found.damage

    assert damage(whole) == (4, [])
    frame = 24 + 4096
    for place in range(0, len(whole), 701):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        kept, said = damage(bytes(flipped))
        assert said and kept < 4, place
    for cut in range(32 + frame + 100, len(whole), 4001):
        kept, said = damage(whole[:cut])
        assert said or (cut - 32) % frame == 0, cut
    journal.close()


def test_a_full_disk_refuses_changes_and_recovers(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    pages: int = sqlite3.connect(controller.path).execute("PRAGMA page_count").fetchone()[0]
    controller.journal._file._db.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(20):
        controller.control.propose(Propose(f"b{number}", EIGHT, reason="x" * 4000))
        controller.settle()
    refused = controller.update_log.state.commands["b19"]
    assert (refused.state, refused.revision) == ("rejected", 0)
    assert "the journal cannot be written (database or disk is full)" in refused.why
    controller.journal._file._db.execute("PRAGMA max_page_count = 100000")
    assert controller.propose("c", EIGHT).state == "accepted"


def test_a_damaged_row_does_not_end_the_journal(controller: ControlHarness) -> None:
    state = controller.propose("a", EIGHT)
    with sqlite3.connect(controller.path) as db:
        db.execute("UPDATE commands SET changes = '{' WHERE id = 'a'")
    controller.journal.insert(Entry(state))
    controller.journal.flush()
    (written,) = controller.journal.take()
    assert "has a command with this id that cannot be read" in written.error
    assert controller.propose("b", {"micro_batches": 2}).state == "accepted"


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.write_bytes(b"not a database" * 100)])
def test_a_journal_that_cannot_be_opened_refuses_every_change(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(tmp_path / "run.db")
    controller = ControlHarness(tmp_path / "run.db")
    controller.train()
    assert "cannot be opened" in controller.journal.failure
    assert controller.propose("a", EIGHT).why == controller.journal.failure
    controller.journal.close()
