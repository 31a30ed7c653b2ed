"""A training loop that is not ours: `join` it to a hub, and it is seen and steered like any other run.

Nothing here blocks the loop or breaks it: what goes wrong in telemetry is told once, in the log of the program, and the
loop goes on without. Only what a program does wrong when it sets things up is raised, as ValueError with a sentence.
"""

import atexit
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from agents.loop.start_hub import endpoint_for, speaks_for_machine
from agents.loop.step import StepReport, summary_of
from agents.loop.vote import LEADER, Agree, Agreement, Disagreement, Word
from agents.protocol import VERSION, Ack, Event, Hello, KnobState, Legal, Message, Step, Value, codec, spell
from agents.protocol import Board as BoardMessage
from agents.rank.agent import Agent
from agents.rank.errors import named
from agents.rank.knob_board import Knob, KnobBoard, NotAppliedError
from agents.rank.vitals import Sensors
from agents.rundir.hub_supervisor import Reach
from agents.rundir.local_machine import this_host
from agents.rundir.runs import RunError

log = logging.getLogger("agents")

TYPES = (bool, int, float, str)
LAST_STEP = 2**53  # the highest number that the wire takes
Legals = Sequence[Value] | tuple[float, float] | None
"""A list of choices, or a pair of bounds; of a bool it may be left out."""


def join(
    run: str,
    rank: int = 0,
    world: int = 1,
    axes: Mapping[str, int] | None = None,
    agree: Agree | None = None,
    *,
    hub: str = "auto",
    run_dir: str | Path | None = None,
    device: str | int | None = None,
    layout: str = "",
    facts: Mapping[str, Value] | None = None,
) -> "Loop":
    """Join the run's hub as one of its ranks. All ranks call it, with the same `run`, `world`, `run_dir` and `layout`.

    `axes`: this rank's place, e.g. ``{"dp": 3, "tp": 0}``. `agree` gives every rank every rank's bytes, and is called
    here and once a step, by all ranks alike; without it, and with more than one rank, there are no knobs. `hub`: "auto"
    (rank 0 starts one, for the ranks of its machine), "none", or the name or URL of one. `device`: the UUID of this
    rank's GPU, or the number CUDA gives it in this process. `facts` are shown beside the numbers.

    ValueError: the arguments cannot be. A hub that cannot be started or found is no error: the loop goes on unseen.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank = {rank} of world = {world} cannot be; legal: 0 to world - 1")
    if not 0 < len(run) <= 64:
        raise ValueError("a run's name has 1 to 64 characters")
    hello = Hello(
        version=VERSION,
        run=run,
        rank=rank,
        world=world,
        coords=dict(axes or {}),
        host=this_host(),
        pid=os.getpid(),
        device="" if device is None else str(device),
        layout=layout or "-",
        revision=0,
        step=0,
        leader=rank == LEADER,
        facts=dict(facts or {}),
        began_s=time.time(),
    )
    _checked(hello)
    stack = ExitStack()
    reached = None
    try:
        reached = endpoint_for(stack, hub, run, Path(run_dir) if run_dir else None, rank, world, agree)
    except RunError:
        if hub != "auto":
            raise
        log.exception("the run goes without a hub")
    except Exception:  # the disk, the collective: not the loop's concern
        log.exception("the run goes without a hub")
    return Loop(hello, reached, agree, Sensors(device, host=speaks_for_machine()), stack)


class Loop:
    """One rank of a loop. `join` makes it; `close` it, or leave it to the interpreter's end."""

    def __init__(
        self, hello: Hello, reached: Reach | None, agree: Agree | None, sensors: Sensors, stack: ExitStack
    ) -> None:
        self._hello, self._agree, self._stack = hello, agree, stack
        self._knobs: list[Knob] = []
        self._values: dict[str, Value] = {}
        self._board = KnobBoard([], {})
        self._agreement: Agreement | None = None
        self._step: int | None = None  # the one that runs, or ran last
        self._warned = False
        self._interrupt: BaseException | None = None  # an `apply` raised it, and the step's end will
        self.doing = (0, "starting", time.monotonic())
        endpoint, key = reached or (None, None)
        self._agent = Agent(endpoint, lambda: self.doing, sensors, key)
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
    ) -> None:
        """Something that may be turned while the loop runs: `apply` is called with the new value, between two steps.

        `legal`: a list of choices, or a pair (lowest, highest). `value` is the one in force now. Declare the same knobs
        on all ranks, before the first step. ValueError: it cannot be turned, and why.

        An `apply` that raises is reported, and the knob keeps its value on this rank. What is no Exception, such as
        KeyboardInterrupt, is raised again at the end of the step, when the ranks have agreed.
        """
        if self._step is not None:
            raise ValueError(f"knob {name} comes too late: knobs are declared before the first step")
        if self._agree is None and self._hello.world > 1:
            raise ValueError(
                f"knob {name} must switch on all {self._hello.world} ranks together, and join() was given no agree= by "
                "which they could; give one (docs/library.md), or declare no knobs"
            )
        if type not in TYPES:
            raise ValueError(f"knob {name}: a {type.__name__} cannot be turned; legal: bool, int, float, str")
        if name in self._values:
            raise ValueError(f"knob {name} is declared twice")
        allowed = _legal(name, type, legal)
        refusal = KnobState(name, value, allowed, loss_neutral).refusal(value)
        if refusal:
            raise ValueError(refusal)
        cast = partial(_cast, name, type)
        value = cast(value)
        self._knobs.append(
            Knob(
                name,
                lambda _: allowed,
                loss_neutral,
                about,
                lambda new: self._apply(name, apply, new),
                lambda values: values[name],
                cast=cast,
            )
        )
        self._values[name] = value
        self._board = KnobBoard(self._knobs, self._values)
        _checked(self._shown())

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[StepReport]:
        """One step of training; numbers count up by themselves. What the body raises goes through."""
        if self._step is None:
            self.quietly(self._begin)
        following = 0 if self._step is None else self._step + 1
        self._step = following if number is None else _counted(number, following)
        report = StepReport(self, self._step)
        self.at(self._step, "step")
        start = time.perf_counter()
        yield report
        step_ms = 1e3 * (time.perf_counter() - start)
        self.quietly(lambda: self._end(report, step_ms))
        self.at(self._step, "between steps")
        interrupt, self._interrupt = self._interrupt, None
        if interrupt:
            raise interrupt

    def close(self) -> None:
        """Say goodbye; on rank 0, end the hub that it started. A second call does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._hello.pid:
            return  # a fork, of a data loader say: the run is not its own to end
        self.quietly(self._leave)
        self.quietly(self._stack.close)

    def at(self, step: int, text: str) -> None:
        """What this rank does now, for the pulse."""
        self.doing = (step, text, time.monotonic())

    def quietly(self, work: Callable[[], object]) -> None:
        """Do something that must not harm the loop: the first failure is told, and none is raised."""
        try:
            work()
        except Exception:  # noqa: BLE001 - whatever it was, training goes on
            if not self._warned:
                self._warned = True
                _log_exception("telemetry has failed; training goes on, and this is not said again")

    # --------------------------------------------------------------------------------------------- inside

    def _begin(self) -> None:
        if self._agree and self._hello.world > 1:
            exchange: Agree = self._agree
        elif self._hello.world == 1:
            exchange = _alone
        else:
            return self._introduce()
        where = self._hello.rank, self._hello.world
        self._agreement = Agreement(*where, exchange, self._board, lambda: self._agent.pending, self._settle)
        return self._introduce()

    def _introduce(self) -> None:
        board = self._board
        self._hello = structs.replace(self._hello, revision=board.revision, step=self.doing[0])
        self._agent.introduce(self._hello, self._shown() if self._hello.leader else None)

    def _shown(self) -> BoardMessage:
        board = self._board
        return BoardMessage(LEADER, board.revision, board.digest(), board.states())

    def _settle(self, ack: Ack) -> None:
        if self._hello.revision != self._board.revision:
            self.quietly(self._introduce)  # before the ack, so that watchers see the new board first
        self.quietly(lambda: self._agent.settle(ack))

    def _apply(self, name: str, apply: Callable[[Any], object], value: Any) -> None:
        try:
            apply(value)
        except BaseException as error:  # one rank that left here would leave the others waiting for it
            if not isinstance(error, Exception):
                self._interrupt = error
            text = f"{name} was not applied: {named(error)}"
            _log_exception(text)
            raise NotAppliedError(text) from error

    def _end(self, report: StepReport, step_ms: float) -> None:
        revision, values = self._board.revision, self._board.values
        tokens = report.count("tokens")
        words = [
            Word(
                report.number,
                step_ms,
                report.numbers.get("loss"),
                report.numbers.get("grad_norm"),
                tokens,
                report.finite("mfu"),
            )
        ]
        if self._agreement:
            with report.phase("agree"):
                words = self._agreed(words)
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
            loss=report.numbers.get("loss"),
        )
        self._agent.send(step)
        if self._hello.rank == LEADER:
            everyone = len(words) == self._hello.world
            self._agent.send(summary_of(step, words, everyone, values, report.finite("lr")))

    def _agreed(self, words: list[Word]) -> list[Word]:
        assert self._agreement
        try:
            return self._agreement.step(words[0])
        except Disagreement as error:
            self._agreement = None
            text = f"the ranks can switch nothing together any more: {error}"
            self._agent.send(Event(time.time(), "error", "loop", text))
            raise

    def _leave(self) -> None:
        command = self._agent.pending
        if command:
            end = "expired", self._step or 0, self._board.digest(), "the run has ended"
            self._agent.settle(Ack(self._hello.rank, command.revision, *end))  # type: ignore[arg-type]
        self._agent.close()


def _checked(message: Message) -> None:
    """ValueError, with the place, for what the wire does not take: it would be refused there at every step."""
    codec.decode(codec.encode([message]))


def _log_exception(text: str) -> None:
    """In the program's log, whose handlers may be anything."""
    with suppress(Exception):
        log.exception("%s", text)


def _counted(number: object, following: int) -> int:
    """A step's number as the program gives it, if it is one; else the `following`."""
    try:
        return min(max(0, operator.index(number)), LAST_STEP)  # type: ignore[arg-type]
    except TypeError:
        return following


def _alone(mine: bytes) -> list[bytes]:
    return [mine]


def _cast(name: str, type: Callable[[Any], Value], value: Value) -> Value:
    """A number for a fraction may be written without a point, and a whole one with it."""
    if type is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name} = {spell(value)} is not legal; it takes whole numbers")
    return type(value)


def _legal(name: str, type: type[Value], legal: Legals) -> Legal:
    if legal is None and type is bool:
        return Legal([False, True])
    if isinstance(legal, tuple) and len(legal) == 2 and type in (int, float):
        return Legal(low=float(legal[0]), high=float(legal[1]))  # type: ignore[arg-type]
    if not legal or not all(isinstance(choice, type) for choice in legal):
        raise ValueError(
            f"knob {name}: legal= says what it may be: a list of choices of type {type.__name__}, or a pair "
            "(lowest, highest) of numbers"
        )
    return Legal(list(legal))
