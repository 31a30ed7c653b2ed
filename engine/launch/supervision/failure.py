"""Finds out why a run failed: reports of failed ranks, the choice of the root cause, and the sentence for the user.

When one rank dies, the others fail too, each in its current collective. The error message must name the rank that
failed first.
"""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from agents.transport.open_files import append_text
from engine.config.refusal import RefusedError
from engine.rendezvous import LastOperation

# A report must fit into the buffer of the socket, because a suspended parent does not read.
MAX_TRACEBACK_CHARS = 60_000
MAX_MESSAGE_CHARS = 1000

DONE = b"done\n"  # the message from a rank to its parent when its work has returned

# Parts of the messages that torch, gloo and NCCL raise when another rank has died, in lower case.
_PEER_ERRORS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "connection was closed",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
    "timed out",
    "timeout",
)


class FailureReport(msgspec.Struct, frozen=True):
    """The report that a failing rank sends to its parent before it exits."""

    rank: int
    step: int | None  # None: not known
    where: str
    type: str
    message: str
    traceback: str
    time: float  # seconds since the epoch
    caused_by_peer: bool  # the error is a consequence of the death of another rank
    refused: bool = False  # the message is a sentence for the user and needs no traceback


def report_of(rank: int, where: LastOperation | None, error: BaseException) -> FailureReport:
    """Build the report of an error that ended the rank's work."""
    chain = list(_chain(error))
    first = chain[-1]
    # If the rank itself fails, its teardown may also fail because of a peer. In this case report the rank's
    # own error.
    shown = first if _is_peer_error(error) else error
    text = "".join(traceback.format_exception(error))
    return FailureReport(
        rank=rank,
        step=where.step if where else None,
        where=where.text if where else "",
        type=type(shown).__name__,
        message=_one_line(str(shown)),
        traceback=text[-MAX_TRACEBACK_CHARS:],
        time=time.time(),
        caused_by_peer=_is_peer_error(first),
        refused=isinstance(error, RefusedError | RunError),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the errors that led to it, back to the first one."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_peer_error(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}".lower()
    return any(words in text for words in _PEER_ERRORS)


def _one_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0][:MAX_MESSAGE_CHARS] if lines else ""


@dataclass
class Outcome:
    """How one rank ended, as observed by its parent."""

    rank: int
    seen: float = 0.0  # when the parent noticed that the rank has ended, in seconds since the epoch
    status: int | None = None  # exit status, or minus the signal number; None while the rank runs
    done: bool = False  # the work function returned
    report: FailureReport | None = None
    where: LastOperation | None = None  # the last recorded operation, also for a killed rank
    # The reason for which the parent killed the rank, such as "did not stop after the stop request ...".
    overdue: str = ""
    ended_by_us: bool = False  # the parent ended the rank because another rank failed
    stacks: str = ""  # Python stacks from the fault handler, after a crash or a timeout

    @property
    def failed(self) -> bool:
        if self.report or self.overdue:
            return True
        return self.status is not None and not self.done and not self.ended_by_us


def root_cause(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of the rank whose failure most likely caused the other failures. At least one rank must have
    failed."""
    return min((outcome for outcome in outcomes if outcome.failed), key=_cause_order)


def _cause_order(outcome: Outcome) -> tuple[int, float]:
    """Sort key that puts the most likely root cause first: failures are ordered by kind, then by time."""
    if outcome.report:
        return (4 if outcome.report.caused_by_peer else 1), outcome.report.time
    if outcome.overdue:
        return 5, outcome.seen
    if outcome.status is not None and outcome.status < 0:
        # gloo aborts a rank that receives invalid data from a peer. Any other signal means that the rank has crashed,
        # or that another process has sent the signal.
        return (2 if outcome.status == -signal.SIGABRT else 0), outcome.seen
    return 3, outcome.seen


def sentence(outcome: Outcome, name: str) -> str:
    """One sentence about a failed rank, without a newline, such as ``rank 3 (pp1 dp0) failed at step 41 in ...``."""
    return f"{_who(outcome.rank, name)} {_what(outcome)}"


def sentence_of_report(report: FailureReport, name: str) -> str:
    """The sentence about a failed rank that torchrun or Slurm started; its parent is not an engine process."""
    where = None if report.step is None else LastOperation(report.step, report.where)
    return sentence(Outcome(report.rank, report=report, where=where), name)


def _who(rank: int, name: str) -> str:
    return f"rank {rank} ({name})" if name else f"rank {rank}"


def _what(outcome: Outcome) -> str:
    position = "before its first step"
    if outcome.where:
        position = f"at step {outcome.where.step}" + (
            f" in {outcome.where.text}" if outcome.where.text else ""
        )
    if outcome.report and outcome.report.refused:
        return f"refuses to start: {outcome.report.message}"
    if outcome.report:
        message = f": {outcome.report.message}" if outcome.report.message else ""
        return f"failed {position}: {outcome.report.type}{message}"
    if outcome.overdue:
        return f"{outcome.overdue} and was killed {position}"
    if outcome.status is not None and outcome.status < 0:
        return f"was killed by {_signal_name(-outcome.status)} {position}"
    return f"exited with status {outcome.status} {position} without completing its work"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report_failure(
    root: Outcome, outcomes: Sequence[Outcome], name_of_rank: Callable[[int], str], file: Path
) -> None:
    """Write the root cause with its traceback to stderr, and the reports of all ranks to `file`."""
    text = sentence(root, name_of_rank(root.rank)) + "\n"
    if root.report and not root.report.refused:
        text += root.report.traceback
    try:
        _write_reports(root, outcomes, name_of_rank, file)
        text += f"reports of all ranks: {file}\n"
    except OSError as error:
        text += f"cannot write the reports of all ranks: {error}\n"
    say(text)


def _write_reports(
    root: Outcome, outcomes: Sequence[Outcome], name_of_rank: Callable[[int], str], path: Path
) -> None:
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence(root, name_of_rank(root.rank))}\n"]
    for outcome in outcomes:
        parts.append(f"\n{_line(outcome, name_of_rank(outcome.rank))}\n")
        parts += [outcome.report.traceback if outcome.report else "", outcome.stacks or ""]
    append_text(path, "".join(parts) + "\n")


def _line(outcome: Outcome, name: str) -> str:
    if outcome.failed:
        return sentence(outcome, name)
    position = f", last at step {outcome.where.step} in {outcome.where.text}" if outcome.where else ""
    how = "had ended without an error" if outcome.done else "was ended because of the failure"
    return f"{_who(outcome.rank, name)} {how}{position}"
