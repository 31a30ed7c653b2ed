"""One rank of a training loop that was connected with `agents.join`: reports its steps and changes its knobs.

Telemetry never blocks the training loop and never raises an error in it: the first failure is logged, and training
continues. Only set-up mistakes raise an error: a ValueError with a one-sentence message.
"""

import atexit
import logging
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal

from msgspec import structs

from agents.loop.coordinates import batch_of
from agents.loop.declared_knobs import Legals, declared_knob
from agents.loop.step import StepReport, summary_of, summed_loads
from agents.loop.vote import Agree, Agreement, Disagreement, RankStep
from agents.protocol import (
    Ack,
    Command,
    Event,
    Experts,
    Hello,
    LayerLoad,
    Message,
    Step,
    Value,
    codec,
    spell,
)
from agents.protocol import Board as BoardMessage
from agents.rank.agent import Agent
from agents.rank.errors import named
from agents.rank.knob_board import Knob, KnobBoard, NotAppliedError, action
from agents.rank.sensors.vitals import Sensors
from agents.rank.vote import LEADER
from agents.rundir.standard_streams import patiently
from agents.transport.reach import Reach

log = logging.getLogger("agents")

# Operations in which a rank may be for a long time without a stall.
EVALUATION, CHECKPOINT, PAUSE = "evaluation", "checkpoint", "between steps"
LAST_STEP = 2**53  # maximum step number that the protocol allows


class Loop:
    """One rank of a training loop, created by `join`. `close` is called at interpreter exit unless the program has
    called it before. `batch`: identifies the tokens on which this rank trains (`batch_of`).
    """

    def __init__(
        self, hello: Hello, reached: Reach | None, agree: Agree | None, sensors: Sensors, stack: ExitStack
    ) -> None:
        self._hello, self._agree, self._stack = hello, agree, stack
        self._knobs: list[Knob] = []
        self._values: dict[str, Value] = {}
        self._board = KnobBoard([], {})
        self._agreement: Agreement | None = None
        self._step: int | None = None  # number of the current or last step
        self._begun = False
        self._refused_step = False  # whether a step number was refused, which is reported once
        self._warned = False
        self._noted_wait = 0  # revision of the last command whose wait was logged
        # A BaseException from an `apply`, raised again at the end of the step.
        self._interrupt: BaseException | None = None
        self.doing = (0, "starting", time.monotonic())
        self.batch = batch_of(hello.coords)
        endpoint, key, _, fallback = reached or (None, None, None, None)
        self._agent = Agent(endpoint, self._operation, sensors, key, fallback)
        self._introduce()
        atexit.register(self.close)

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def knob(
        self,
        name: str,
        type: type[Value],
        legal: Legals = None,
        *,
        value: Value,
        apply: Callable[[Any], object],
        loss_neutral: bool,
        about: str = "",
        waits: Callable[[Any], str] | None = None,
    ) -> None:
        """Declare a knob. Between two steps, `apply` is called with the knob's new value.

        `legal`: a list of choices, or a pair (lowest, highest), or a function that returns one of these if the legal
        values change during the run. `value`: the current value. Declare the same knobs on all ranks, before the first
        step. Raises ValueError if the declaration is invalid.

        If `apply` raises, the error is reported and the knob keeps its value on this rank. A BaseException such as
        KeyboardInterrupt is raised again at the end of the step, after the vote.

        `waits` is called with the new value at the end of a step. `waits` returns "" if the value may be applied now,
        or else the reason why the change waits for a later step. `waits` must return the same result on all ranks. If
        `waits` raises ValueError, the change is refused.
        """
        self._check_declaration(name)
        applied = partial(self._apply, name, apply)
        knob, value = declared_knob(name, type, legal, value, applied, loss_neutral, about, waits)
        self._declare(knob, {name: value})

    def action(self, name: str, apply: Callable[[], object], *, about: str = "", ends: bool = False) -> None:
        """Declare an action, such as a save, whose `apply` is called once per request, between two steps, on all ranks.

        `ends`: the action ends the run. Raises ValueError if the declaration is invalid.
        """
        self._check_declaration(name)
        self._declare(action(name, about, partial(self._apply, name, lambda _: apply()), ends), {})

    def event(
        self,
        text: str,
        level: Literal["info", "warning", "error"] = "info",
        facts: Mapping[str, Value] | None = None,
    ) -> None:
        """Add a line to the run's log. `facts`: machine-readable details, such as `agents.protocol.CHECKPOINT_STEP`."""
        self.quietly(lambda: self._agent.send(Event(time.time(), level, "loop", text, dict(facts or {}))))

    def _check_declaration(self, name: str) -> None:
        if self._begun:
            raise ValueError(f"knob {name} is declared too late: declare knobs before the first step")
        if not self._switches_together():
            raise ValueError(
                f"knob {name} must switch on all {self._hello.world} ranks together, which needs agree= in join() "
                "(docs/join/library.md)"
            )
        if name in (knob.name for knob in self._knobs):
            raise ValueError(f"knob {name} is declared twice")

    def _switches_together(self) -> bool:
        """Whether all ranks can switch a knob at the same step."""
        return self._agree is not None or self._hello.world == 1

    def _declare(self, knob: Knob, values: dict[str, Value]) -> None:
        self._knobs.append(knob)
        self._values |= values
        self._board = KnobBoard(self._knobs, self._values)
        check_sendable(self._board_message())

    @contextmanager
    def step(self, number: float | None = None) -> Iterator[StepReport]:
        """Context manager for one training step. `number` defaults to the number of the last step plus 1. Exceptions
        raised in the body propagate. A step whose number is not legal is not recorded (`StepReport.recorded`), and the
        run's log says so once; training is not disturbed.
        """
        report = self.begin(number)
        start = time.perf_counter()
        try:
            yield report
        except BaseException:  # the program has failed, or has not executed the step
            if self.doing[0] == report.number:
                self.at(report.number, PAUSE)
            raise
        self.end(report, 1e3 * (time.perf_counter() - start))

    def begin(self, number: float | None = None) -> StepReport:
        """Begin a step, as `step` does. The caller measures the time of the step and then calls `end`."""
        if not self._begun:
            self._begun = True
            self.quietly(self._begin)
        try:
            self._step = step_number(number, 0 if self._step is None else self._step + 1)
        except ValueError as error:
            self.quietly(partial(self._refuse_step, str(error)))
            self.at(self._step or 0, "a step that is not recorded")
            return StepReport(self, self._step or 0, recorded=False)
        self.at(self._step, "step")
        return StepReport(self, self._step)

    def _refuse_step(self, why: str) -> None:
        if not self._refused_step:
            self._refused_step = True
            log.warning("%s", why)
            self.event(f"{why}; further such steps are not reported", "error")

    def end(self, report: StepReport, step_ms: float) -> None:
        """End the step of `report`, which took `step_ms`: send the report, and vote on a pending change."""
        self.quietly(lambda: self._end(report, step_ms))
        self.at(report.number, PAUSE)
        interrupt, self._interrupt = self._interrupt, None
        if interrupt:
            raise interrupt

    def collectives(self, recorder: Callable[[], str]) -> None:
        """Set the function that describes this rank's newest collectives in one sentence. The agent sends this sentence
        together with the stack traces of the rank's threads. `recorder` is called in a thread of the agent, only when
        stacks are collected, for example while the loop hangs.
        """
        self._agent.collectives(recorder)

    def at_close(self, work: Callable[[], object]) -> None:
        """Call `work` when this rank leaves the run: after its last messages, and before rank 0 ends its hub."""
        self._stack.callback(self.quietly, work)

    def close(self) -> None:
        """Leave the run; rank 0 also ends the hub that it started. A second call does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._hello.pid:
            return  # a forked process, such as a data loader, must not end the run of its parent
        self.quietly(self._leave)
        self.quietly(self._stack.close)

    def at(self, step: int, text: str) -> None:
        """Set the current operation of this rank, which its heartbeat (`Pulse`) reports to the hub."""
        self.doing = (step, text, time.monotonic())

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Report `name` as this rank's operation in the body, such as `EVALUATION` or `CHECKPOINT`, which may take any
        time (docs/operate/alerts.md)."""
        before = self.doing[1]
        self.at(self.doing[0], name[:64] or "unnamed")
        try:
            yield
        finally:
            self.at(self.doing[0], before)

    def _operation(self) -> tuple[int, str, float]:
        """The step, the current operation and the start of the operation. Called in the agent's thread."""
        return self.doing

    def quietly(self, work: Callable[[], object]) -> None:
        """Call `work` and suppress its exceptions; the first failure is logged."""
        try:
            work()
        except Exception:  # noqa: BLE001 - training continues after any failure
            if not self._warned:
                self._warned = True
                _log_exception("telemetry has failed; training continues, and later failures are not logged")

    def _begin(self) -> None:
        if self._agree and self._hello.world > 1:
            exchange: Agree = self._agree
        elif self._hello.world == 1:
            exchange = _only_rank
        else:
            return self._introduce()
        rank, world = self._hello.rank, self._hello.world
        self._agreement = Agreement(
            rank, world, exchange, self._board, lambda: self._agent.pending, self._settle, self._note_wait
        )
        return self._introduce()

    def _introduce(self) -> None:
        board = self._board
        self._hello = structs.replace(self._hello, revision=board.revision, step=self.doing[0])
        self._agent.introduce(self._hello, self._board_message() if self._hello.leader else None)

    def _board_message(self) -> BoardMessage:
        board = self._board
        return BoardMessage(LEADER, board.revision, board.digest(), board.states())

    def _settle(self, ack: Ack) -> None:
        if self._hello.revision != self._board.revision:
            self.quietly(self._introduce)  # sent before the ack, so that subscribers get the new board first
        self.quietly(lambda: self._agent.settle(ack))

    def _note_wait(self, command: Command, why: str) -> None:
        if self._noted_wait < command.revision:
            self._noted_wait = command.revision
            changes = ", ".join(f"{name} = {spell(value)}" for name, value in command.changes.items())
            self.event(f"{changes} waits: {why}", facts={"revision": command.revision})

    def _apply(self, name: str, apply: Callable[[Any], object], value: Any) -> None:
        try:
            apply(value)
        except BaseException as error:  # if the error ended this rank, the other ranks would wait forever
            if not isinstance(error, Exception):
                self._interrupt = error
            text = f"{name} was not applied: {named(error)}"
            _log_exception(text)
            raise NotAppliedError(text) from error

    def _end(self, report: StepReport, step_ms: float) -> None:
        revision, values = self._board.revision, self._board.values
        tokens = report.count("tokens")
        steps = [
            RankStep(
                report.number,
                step_ms,
                report.loss,
                report.numbers.get("grad_norm"),
                tokens,
                report.finite("mfu"),
                weight=report.finite("loss_weight"),
                loads=report.own_experts,
                batch=self.batch,
                skipped=report.skipped,
            )
        ]
        if self._agreement and self._hello.world > 1:
            with report.phase("agree"):
                steps = self._exchange(steps[0])
        elif self._agreement:
            steps = self._exchange(steps[0])
        step = Step(
            rank=self._hello.rank,
            step=report.number,
            seq=0,
            revision=revision,
            step_ms=step_ms,
            phases=report.phases,
            tokens=tokens,
            comm={},
            memory_bytes=report.count("memory_bytes"),
            tokens_per_s=1e3 * tokens / step_ms if tokens is not None and step_ms else None,
            mfu=report.finite("mfu"),
            loss=report.loss,
            grad_norm=None if report.skipped else report.numbers.get("grad_norm"),
        )
        if not report.recorded:
            return
        self._agent.send(step)
        if self._hello.rank == LEADER:
            self._note_overflow(report)
            everyone = len(steps) == self._hello.world
            if report.own_experts is not None and everyone:
                report.report_experts(summed_loads(steps))
            self._agent.send(summary_of(step, steps, everyone, values, report))
            self._send_experts(report)

    def _note_overflow(self, report: StepReport) -> None:
        scale = report.finite("loss_scale")
        if report.skipped and scale is not None:
            overflow = f"step {report.number}: a gradient overflowed in fp16 at loss scale {scale:g}"
            self._agent.send(
                Event(time.time(), "warning", "loop", f"{overflow}, so the scaler skipped the update")
            )

    def _send_experts(self, report: StepReport) -> None:
        if report.experts and self._agent.wants("experts", report.number):
            layers = [
                LayerLoad(layer, list(load), report.dropped.get(layer, 0))
                for layer, load in sorted(report.experts.items())
            ]
            self._agent.send(Experts(report.number, layers))

    def _exchange(self, own: RankStep) -> list[RankStep]:
        assert self._agreement
        try:
            return self._agreement.step(own)
        except Disagreement as error:
            self._agreement = None
            text = f"the ranks can no longer switch knobs together: {error}"
            self._agent.send(Event(time.time(), "error", "loop", text))
            raise

    def _leave(self) -> None:
        command = self._agent.pending
        if command:
            end = "expired", self._step or 0, self._board.digest(), "the run has ended"
            self._agent.settle(Ack(self._hello.rank, command.revision, *end))  # type: ignore[arg-type]
        self._agent.close()


def check_sendable(message: Message) -> None:
    """Raise ValueError, with the name of the field, if the hub would refuse this message."""
    codec.decode(codec.encode([message]))


def _log_exception(text: str) -> None:
    """Log the current exception; errors raised by the program's logging handlers are ignored, and the program does not
    wait for them."""
    error = sys.exc_info()

    def work() -> None:
        with suppress(Exception):
            log.error("%s", text, exc_info=error)

    patiently(work)


def step_number(number: object, following: int) -> int:
    """The program's step number, exactly; `following` if it is None. Raises ValueError with a one-sentence message if
    it is not a whole number that the protocol allows."""
    if number is None:
        return following
    try:
        # A float that is a whole number is exact.
        whole = int(number) if isinstance(number, float) and number.is_integer() else operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        whole = -1
    if not 0 <= whole <= LAST_STEP:
        raise ValueError(
            f"step {repr(number)[:64]} is not recorded; legal: a whole number from 0 to {LAST_STEP}"
        )
    return int(whole)


def _only_rank(own: bytes) -> list[bytes]:
    """The `agree` function of a run with one rank."""
    return [own]
