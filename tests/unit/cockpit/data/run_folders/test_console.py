"""The console output of a run: bounded reads of files that grow, and text without control codes."""

from pathlib import Path

import pytest

from cockpit.data.run_folders import console
from cockpit.data.run_folders.console import Console, Tail, plain_line


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m text\x1b[K", "red text"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (" 10 %\r 50 %\r100 %\r\n", "100 %"),
        ("a\tb", "a       b"),
        ("\x9b31mx\x1b", "x"),
        ("\u202egnp.exe\x07", " gnp.exe "),
        ("[b]markup[/b]", "[b]markup[/b]"),
    ],
)
def test_escape_codes_and_control_characters_are_removed(raw: str, shown: str) -> None:
    assert plain_line(raw) == shown


def texts(tail: Tail) -> list[str]:
    tail.poll()
    return [line.text for line in tail.lines]


def test_follows_a_file_that_grows_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    tail = Tail(path)
    assert texts(tail) == [] and "No such file" in tail.problem
    path.write_bytes(b"one\ntw")
    assert texts(tail) == ["one", "tw"] and not tail.problem
    with path.open("ab") as file:
        file.write(b"o\nbad \xff byte\n")
    assert texts(tail) == ["one", "two", "bad � byte"]
    assert [line.number for line in tail.lines] == [0, 1, 2]
    path.write_bytes(b"new\n")
    assert texts(tail) == ["new"]
    path.unlink()
    path.mkdir()
    assert texts(tail) == ["new"] and tail.problem == f"{path} cannot be read: not a regular file"


def test_reads_only_the_end_and_says_how_much_is_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "FIRST_BYTES", 100)
    monkeypatch.setattr(console, "MORE_BYTES", 50)
    path = tmp_path / "engine.log"
    lines = b"".join(b"%09d\n" % n for n in range(1000))
    path.write_bytes(lines)
    tail = Tail(path)
    assert texts(tail) == [f"{n:09}" for n in range(991, 1000)]
    assert tail.unread_bytes == 9910
    with path.open("ab") as file:
        file.write(b"".join(b"%09d\n" % n for n in range(1000, 1020)))
    assert texts(tail)[-4:] == [f"{n:09}" for n in range(1016, 1020)]
    assert len(tail.lines) == 9 + 4 and tail.unread_bytes == 9910 + 160


def test_a_run_has_several_files(tmp_path: Path) -> None:
    output = Console(tmp_path)
    output.read()
    assert output.tail is None and output.read_once
    (tmp_path / "hub.log").write_text("hub\n")
    (tmp_path / "engine.log").write_text("engine\n")
    revision = output.revision
    output.read()
    assert output.tail and output.tail.path.name == "engine.log" and output.revision > revision
    output.next_file()
    output.read()
    assert output.tail and [line.text for line in output.tail.lines] == ["hub"]
    revision = output.revision
    output.read()
    assert output.revision == revision  # nothing new
