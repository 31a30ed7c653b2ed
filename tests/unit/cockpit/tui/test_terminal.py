"""Tests that a closed terminal ends the cockpit and never blocks it."""

from io import StringIO

from textual.drivers._writer_thread import MAX_QUEUED_WRITES, WriterThread

from cockpit.tui.terminal.terminal import LosableFile


class Gone(StringIO):
    """A closed pseudo-terminal."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_writes_to_a_lost_terminal_are_dropped_and_reported_once() -> None:
    lost: list[bool] = []
    writer = WriterThread(LosableFile(Gone(), lambda: lost.append(True)))  # type: ignore[arg-type]
    writer.start()
    # a dead writer thread would block the first write to a full queue
    for _ in range(10 * MAX_QUEUED_WRITES):
        writer.write("x")
    writer.stop()
    assert lost == [True]


def test_an_open_terminal_gets_everything() -> None:
    terminal = StringIO()
    writer = WriterThread(LosableFile(terminal, lambda: None))  # type: ignore[arg-type]
    writer.start()
    writer.write("a")
    writer.write("b")
    writer.stop()
    assert terminal.getvalue() == "ab"
