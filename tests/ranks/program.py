"""Runs programs that need torch: each program is forked from one process that has already imported torch. Importing
torch takes three seconds of CPU time, and dozens of tests start such programs.

`Program` has the interface of `subprocess.Popen`, and `run` that of `subprocess.run`, as far as these tests need them.
Each program runs in its own process, with its own session, arguments, environment, output and exit status.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.ranks.preloaded"])


class Program:
    """A process that runs `python WORDS ...`. `words` begins with ``-m MODULE`` or with the path of a script,
    optionally after ``-W ignore``.

    Standard error goes to the file `errors`, or to a pipe if `errors` is None. The program ends when the process that
    started it ends.
    """

    def __init__(
        self, *words: str, environ: Mapping[str, str] | None = None, errors: Path | None = None
    ) -> None:
        self.args = words
        output, its_output = _SERVER.Pipe(duplex=False)
        error, its_error = _SERVER.Pipe(duplex=False)
        started = (words, dict(environ or os.environ), its_output, errors or its_error)
        self._process = _SERVER.Process(target=_main, args=started, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout, self.stderr = _text(output), _text(error)
        its_output.close()
        its_error.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program ends. Returns its exit status, or -N if signal N ended it."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read stdout and stderr until every process has closed them, and wait until the program ends."""
        texts = {1: "", 2: ""}

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                texts[number] = stream.read()

        threads = [
            threading.Thread(target=read, args=(number, stream), daemon=True)
            for number, stream in ((1, self.stdout), (2, self.stderr))
            if not stream.closed
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return texts[1], texts[2]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    *words: str, timeout: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS ...` and wait for it to end. After `timeout` seconds, kill the process and raise
    `subprocess.TimeoutExpired`."""
    program = Program(*words, environ=environ)
    try:
        output, errors = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(words, program.wait(), output, errors)


def _text(pipe: Connection) -> IO[str]:
    """The read end of a pipe, as a text stream."""
    with pipe:
        return open(os.dup(pipe.fileno()))


def _main(
    words: Sequence[str], environ: dict[str, str], output: Connection, errors: Connection | Path
) -> None:
    """Run in the forked process: start a new session, then run the module or script as ``__main__``."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = (
        os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if isinstance(errors, Path)
        else errors.fileno()
    )
    for number, target in enumerate((nothing, output.fileno(), file)):
        os.dup2(target, number)
    output.close()
    if isinstance(errors, Connection):
        errors.close()
    else:
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the standard streams stay open
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.insert(0, str(ROOT))
    if words[:2] == ("-W", "ignore"):
        warnings.simplefilter("ignore")
        words = words[2:]
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - like the interpreter
        traceback.print_exc()
        raise SystemExit(1) from None
