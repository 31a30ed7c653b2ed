"""Messages on a standard stream whose pipe is full because nobody reads it."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agents.loop import loop
from agents.rundir import standard_streams
from agents.rundir.standard_streams import patiently, say
from agents.wrap import hooks


@contextmanager
def full_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make stderr a full pipe, and return its read end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, 4096 * b".")
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(standard_streams, "PATIENCE_S", 0.05)
        yield reader
    os.close(reader)


def test_a_message_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_stderr(monkeypatch) as reader:
        say("lost\n")
        hooks.say("lost")
        assert b"lost" not in os.read(reader, 1 << 20)
        say("x" * 3000 + "\n")  # longer than one part
        hooks.say("read")
        assert os.read(reader, 1 << 20) == b"x" * 3000 + b"\ncockpit wrap: read\n"


def test_a_message_through_the_programs_logging_does_not_wait_for_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = logging.getLogger("agents")
    with full_stderr(monkeypatch) as reader:
        handler = logging.StreamHandler(sys.stderr)
        log.addHandler(handler)
        try:
            raise ValueError("mine")
        except ValueError:
            loop._log_exception("a knob could not be applied")
        finally:
            log.removeHandler(handler)
        [waiting] = [thread for thread in threading.enumerate() if thread.name == "message"]
        os.read(reader, 1 << 20)
        waiting.join()
        assert os.read(reader, 1 << 20).endswith(b"ValueError: mine\n")


def test_short_work_is_done_at_once() -> None:
    done: list[int] = []
    patiently(lambda: done.append(1))
    assert done == [1]
