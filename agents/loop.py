"""A training loop that is not ours: `join` it to a hub, and it is seen and steered like any other run.

Nothing here blocks the loop or breaks it: what goes wrong in telemetry is told once, in the log of the program, and the
loop goes on without. Only what a program does wrong when it sets things up is raised, as ValueError with a sentence.
"""

import atexit
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from agents.agent import Agent
from agents.agreement import LEADER, Agree, Agreement, Word
from agents.attach import endpoint_for, speaks_for_machine
from agents.board import Board, Knob
from agents.keeper import Reach
from agents.runs import RunError, this_host
from agents.vitals import Sensors
from agents.wire import VERSION, Ack, Event, Hello, KnobState, Legal, Step, Summary, Value
from agents.wire import Board as BoardMessage

log = logging.getLogger("agents")

TYPES = (bool, int, float, str)
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
    return Loop(hello, reached, agree, Sensors(device, host=speaks_for_machine()), stack)


class Report:
    """One step, while it runs."""

    def __init__(self, loop: "Loop", step: int) -> None:
        self._loop = loop
        self.number = step
        self.phases: dict[str, float] = {}  # ms
        self.numbers: dict[str, float | None] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step with a name: its time is told, and that the rank is in it, should it get stuck."""
        before = self._loop.doing[1]
        self._loop.at(self.number, name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + 1e3 * (time.perf_counter() - start)
            self._loop.at(self.number, before)

    def report(
        self,
        *,
        loss: Any = None,
        tokens: Any = None,
        grad_norm: Any = None,
        lr: Any = None,
        mfu: Any = None,
        memory_bytes: Any = None,
    ) -> None:
        """What this rank knows of its step: any of it, in one call or several; whatever `float` takes.

        `loss` is the mean over this rank's `tokens`; the job's is their mean by tokens, and `grad_norm` is the
        largest that a rank tells. `mfu` is 0..1.
        """
        told = {"loss": loss, "tokens": tokens, "grad_norm": grad_norm, "lr": lr, "mfu": mfu}
        for name, value in (told | {"memory_bytes": memory_bytes}).items():
            if value is not None:
                self._loop.quietly(partial(self._note, name, value))

    def _note(self, name: str, value: Any) -> None:
        self.numbers[name] = float(value)

    def count(self, name: str) -> int | None:
        value = self.numbers.get(name)
        return int(value) if value is not None and 0 <= value < 2**53 else None

    def finite(self, name: str) -> float | None:
        value = self.numbers.get(name)
        return value if value is not None and math.isfinite(value) else None


class Loop:
    """One rank of a loop. `join` makes it; `close` it, or leave it to the interpreter's end."""

    def __init__(
        self, hello: Hello, reached: Reach | None, agree: Agree | None, sensors: Sensors, stack: ExitStack
    ) -> None:
        self._hello, self._agree, self._stack = hello, agree, stack
        self._knobs: list[Knob] = []
        self._values: dict[str, Value] = {}
        self._board = Board([], {})
        self._agreement: Agreement | None = None
        self._step: int | None = None  # the one that runs, or ran last
        self._warned = False
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
        cast: Callable[[Any], Value] = type  # a number for a fraction may be written without a point
        self._knobs.append(
            Knob(
                name,
                lambda _: allowed,
                loss_neutral,
                about,
                lambda new: self._apply(name, apply, new),
                lambda values: cast(values[name]),
            )
        )
        self._values[name] = value
        self._board = Board(self._knobs, self._values)

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[Report]:
        """One step of training; numbers count up by themselves. What the body raises goes through."""
        if self._step is None:
            self._begin()
        following = 0 if self._step is None else self._step + 1
        self._step = following if number is None else number
        report = Report(self, self._step)
        self.at(self._step, "step")
        start = time.perf_counter()
        yield report
        step_ms = 1e3 * (time.perf_counter() - start)
        self.quietly(lambda: self._end(report, step_ms))
        self.at(self._step, "between steps")

    def close(self) -> None:
        """Say goodbye; on rank 0, end the hub that it started. A second call does nothing."""
        atexit.unregister(self.close)
        self.quietly(self._leave)
        self.quietly(self._stack.close)

    def at(self, step: int, text: str) -> None:
        """What this rank does now, for the pulse."""
        self.doing = (step, text, time.monotonic())

    def quietly(self, work: Callable[[], object]) -> None:
        """Do something that must not harm the loop: the first failure is told, and none is raised."""
        try:
            work()
        except Exception:  # whatever it was, training goes on
            if not self._warned:
                self._warned = True
                log.exception("telemetry has failed; training goes on, and this is not said again")

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
        shown = BoardMessage(LEADER, board.revision, board.digest(), board.states())
        self._agent.introduce(self._hello, shown if self._hello.leader else None)

    def _settle(self, ack: Ack) -> None:
        if ack.state == "applied":
            self._introduce()  # before the ack, so that watchers see the new board first
        self._agent.settle(ack)

    def _apply(self, name: str, apply: Callable[[Any], object], value: Any) -> None:
        try:
            apply(value)
        except Exception as error:
            text = f"{name} was not applied: {error!r}; the ranks differ now"
            log.exception("%s", text)
            self._agent.send(Event(time.time(), "error", "loop", text))

    def _end(self, report: Report, step_ms: float) -> None:
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
            self._agent.send(_summary(step, words, everyone, values, report.finite("lr")))

    def _agreed(self, words: list[Word]) -> list[Word]:
        assert self._agreement
        try:
            return self._agreement.step(words[0])
        except Exception as error:
            self._agreement = None
            text = f"the ranks can switch nothing together any more: {error!r}"
            self._agent.send(Event(time.time(), "error", "loop", text))
            raise

    def _leave(self) -> None:
        command = self._agent.pending
        if command:
            end = "expired", self._step or 0, self._board.digest(), "the run has ended"
            self._agent.settle(Ack(self._hello.rank, command.revision, *end))  # type: ignore[arg-type]
        self._agent.close()


def _alone(mine: bytes) -> list[bytes]:
    return [mine]


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


def _summary(
    step: Step, words: list[Word], everyone: bool, values: Mapping[str, Value], lr: float | None
) -> Summary:
    """The step of the whole job, as far as it is known; where ranks tell each other nothing, rank 0's own loss."""
    slowest = max(word.step_ms for word in words)
    tokens = [word.tokens for word in words if word.tokens is not None]
    losses = [(word.loss, word.tokens or 0) for word in words if word.loss is not None]
    weight = sum(count for _, count in losses)
    if weight:
        loss: float | None = sum(value * count for value, count in losses) / weight
    else:
        loss = sum(value for value, _ in losses) / len(losses) if losses else None
    mfus = [word.mfu for word in words if word.mfu is not None]
    return Summary(
        step=step.step,
        revision=step.revision,
        time_s=time.time(),
        loss=loss,
        grad_norm=max((word.grad_norm for word in words if word.grad_norm is not None), default=None),
        step_ms=slowest,
        tokens_per_s=1e3 * sum(tokens) / slowest if everyone and tokens and slowest else None,
        mfu=sum(mfus) / len(mfus) if everyone and mfus else None,
        bubble=None,
        bubble_bound=None,
        oversubscribed=False,
        a2a_bytes=None,
        comm={},
        dropped=None,
        load_max_over_mean=None,
        knobs=dict(values),
        lr=lr,
    )
