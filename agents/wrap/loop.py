"""The loop of a wrapped rank: sends the hub its steps, and exchanges reports and votes with the other ranks every few
steps (`agents.wrap.rounds`), so that all ranks apply a knob change after the same step."""

import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from agents.loop.adapters.knobs.learning_rate import LR_SCALE, LearningRateScale
from agents.loop.adapters.torch_ranks import memory_bytes
from agents.loop.coordinates import batch_of
from agents.loop.loop import Loop
from agents.loop.step import StepReport, summary_of
from agents.loop.vote import RankStep
from agents.protocol import Ack, Command, Hello, Step, Traffic
from agents.rank.sensors.vitals import Sensors
from agents.rank.vote import LEADER, Voter
from agents.transport.reach import Reach
from agents.wrap.exchange import ClosedError, StoreRanks
from agents.wrap.joining import MODEL_AXES
from agents.wrap.rounds import FIRST_GAP, MOST_RECORDS, Record, Report, Rounds, decide
from agents.wrap.sensors.losses import StepLoss
from agents.wrap.sensors.phases import COMMUNICATION, Phases

MEMORY_S = 0.5  # minimum time between two readings of the memory
LATE_LOSSES = 256  # steps whose loss is still on its way from the GPU
# The operation that a rank reports in a phase, if it is not the name of the phase.
OPERATIONS = {COMMUNICATION: "waiting in a collective"}
BYE_S = 2.0  # how long rank 0 keeps its hub at the end, for the last messages of the other ranks


@dataclass(frozen=True)
class _Measured:
    step: Step
    loss: StepLoss
    lr: float | None


class WrappedLoop(Loop):
    """One rank of a program that runs under `cockpit wrap`. `stopping`: whether an operator has stopped the run. `why`:
    the error in the monitoring code, after which the program is no longer monitored; "" if there is none.
    """

    def __init__(
        self,
        hello: Hello,
        reached: Reach | None,
        ranks: StoreRanks | None,
        sensors: Sensors,
        stack: ExitStack,
        rates: LearningRateScale,
        phases: Phases,
        closing: threading.Event,
    ) -> None:
        self._phases = phases
        super().__init__(hello, reached, None, sensors, stack)
        self.stopping, self.why = False, ""
        # A data loader gives whole sequences, also to the ranks that then divide them.
        self.batch = batch_of(hello.coords, MODEL_AXES)
        self._ranks, self._rates, self._closing = ranks, rates, closing
        self._late: deque[_Measured] = deque(maxlen=LATE_LOSSES)
        self._records: deque[Record] = deque(maxlen=MOST_RECORDS)
        self._stride, self._gap = 1, FIRST_GAP
        self._memory, self._memory_read = 0, 0.0
        self._number = 0  # number of the next round
        self._round_step: int | None = None  # step after which the next round takes place
        self._last_round = (0, 0.0)  # step and time of the last round
        self._voting: Command | None = None
        self.knob(
            "lr_scale",
            float,
            LR_SCALE,
            value=rates.scale,
            apply=lambda scale: setattr(rates, "scale", scale),
            loss_neutral=False,
            about="factor on the learning rates that the program sets",
        )
        self.action("stop", self._stop, about="end the program after this step, by SystemExit", ends=True)
        self._voter = Voter(
            hello.rank,
            self._board,
            lambda: self._agent.pending,
            self._settle_own,
            BaseException,
            self._note_wait,
        )
        self._introduce()
        self._rounds = Rounds(ranks, self._position) if ranks else None

    def _switches_together(self) -> bool:
        """Always true: all wrapped ranks can switch a knob at the same step, because they vote in rounds."""
        return True

    def _position(self) -> tuple[int, float | None]:
        """The number of the last step and the mean step time, from which rank 0 chooses the step of the first exchange
        of reports and votes."""
        last, then = self._last_round
        step = self._step or 0
        return step, (time.perf_counter() - then) / (step - last) if last and step > last + 1 else None

    def _operation(self) -> tuple[int, str, float]:
        step, operation, since = self.doing
        phase, phase_since = self._phases.current
        return step, OPERATIONS.get(phase, phase) or operation, max(since, phase_since)

    def quietly(self, work: Any) -> None:
        """Call `work`. The first exception is stored in `why`; the hooks are then removed at the end of the step."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - training continues after any failure
            self.why = self.why or f"{type(error).__name__}: {error}"

    def measured(
        self,
        number: int,
        step_ms: float,
        phases: dict[str, float],
        comm: dict[str, Traffic],
        loss: StepLoss,
        tokens: int | None,
        lr: float | None,
    ) -> None:
        """Report a step that the program has completed. If the ranks exchange their reports and votes after this step,
        submit this rank's."""
        self._step = number
        self.doing = (number, "between phases", time.monotonic())
        if number % self._stride == 0:
            step = Step(
                rank=self._hello.rank,
                step=number,
                seq=0,
                revision=self._board.revision,
                step_ms=step_ms,
                phases=phases,
                tokens=tokens,
                comm=comm,
                memory_bytes=self._memory_now(),
                tokens_per_s=1e3 * tokens / step_ms if tokens and step_ms else None,
            )
            self._late.append(_Measured(step, loss, lr))
        self.quietly(self._send_ready)
        if not self._last_round[0]:
            self._last_round = (number, time.perf_counter())
        if self._round_step is None:
            self._round_step = self._rounds.start if self._rounds else number + FIRST_GAP
        if number == self._round_step:
            self.quietly(self._round)

    def _memory_now(self) -> int:
        now = time.perf_counter()
        if not self._memory or now - self._memory_read > MEMORY_S:
            self._memory, self._memory_read = memory_bytes(), now
        return self._memory

    def _send_ready(self) -> None:
        """Send the steps whose loss has been copied to the CPU."""
        while self._late and self._late[0].loss.ready:
            measured = self._late.popleft()
            step = structs.replace(measured.step, loss=measured.loss.value())
            self._agent.send(step)
            record = Record(
                step.step, step.step_ms, step.loss, step.tokens, step.comm, measured.lr, self.batch
            )
            if self._rounds:
                self._records.append(record)
            elif self._hello.rank == LEADER:
                self._send_summary(step.step, step.revision, [record], self._hello.world == 1)

    def _send_summary(self, number: int, revision: int, records: list[Record], everyone: bool) -> None:
        own = records[LEADER]
        report = StepReport(self, number)
        report.report(lr=own.lr)
        ranks = [
            RankStep(one.step, one.step_ms, one.loss, None, one.tokens, None, weight=1, batch=one.batch)
            for one in records
        ]
        step = Step(
            rank=LEADER,
            step=number,
            seq=0,
            revision=revision,
            step_ms=own.step_ms,
            phases={},
            tokens=None,
            comm={},
        )
        summary = summary_of(step, ranks, everyone, self._board.values, report)
        self._agent.send(structs.replace(summary, comm=_total(records) if everyone else {}))

    # ------------------------------------------------------------------------------------------ rounds

    def _round(self) -> None:
        """Read rank 0's decision of the previous round. If it contains all ranks' votes on a knob change, apply this
        change unless a rank objected. If it proposes a new change, vote on it. Then submit the report for this round,
        with the vote."""
        assert self._step is not None
        number, self._number = self._number, self._number + 1
        vote: str | None = None
        if number and self._rounds:
            outcome = self._rounds.outcome()
            if outcome is None:
                return self._end_rounds()
            decision, reports = outcome
            if self._voting and decision.votes:
                self._carry_out(self._voting, decision.votes)
            self._voting = decision.command
            vote = self._vote_on(self._voting) if self._voting else None
            self._stride, self._gap = decision.stride, decision.gap
            self._summarize(reports)
        command = None if self._voting else self._voter.choose(self._step) if self._hello.leader else None
        last, then = self._last_round
        now = time.perf_counter()
        step_s = (now - then) / max(1, self._step - last)
        self._last_round = (self._step, now)
        report = Report(self._step, step_s, list(self._records), command, vote)
        if self._rounds:
            self._records.clear()
            self._rounds.submit(number, report)
        else:
            decision = decide([report])
            self._stride, self._gap = decision.stride, decision.gap
            if command:
                self._carry_out(command, [self._vote_on(command)])
        self._round_step = self._step + self._gap
        return None

    def _vote_on(self, command: Command) -> str:
        """This rank's objection to a command; "" if it has none."""
        objections: list[str] = []

        def collect(own: str) -> list[str]:
            objections.append(own)
            return [own or "votes"]  # no commit yet

        own = Voter(-1, self._board, lambda: None, lambda ack: None, BaseException)
        own.vote(command, self._step or 0, collect)
        return objections[0]

    def _carry_out(self, command: Command, votes: list[str]) -> None:
        """Apply a command unless a rank objected. All ranks call this after the same step, once all have voted."""
        step = self._step or 0
        prepared = self._voter.vote(command, step, lambda own: votes)
        if prepared is not None:
            self._voter.commit(command, prepared, step)

    def _summarize(self, reports: list[Report]) -> None:
        """On rank 0: send the summaries of the steps that all ranks reported."""
        by_rank = [{record.step: record for record in report.records} for report in reports]
        for number in by_rank[LEADER] if by_rank else ():
            records = [steps.get(number) for steps in by_rank]
            known = [record for record in records if record is not None]
            if len(known) == len(records):
                self._send_summary(number, self._board.revision, known, True)

    def _end_rounds(self) -> None:
        """Stop exchanging reports and votes with the other ranks, because an exchange has failed, for example because a
        rank did not take part in time. The ranks can then no longer change knobs, but each rank continues to report its
        own steps."""
        rounds, self._rounds, self._ranks = self._rounds, None, None
        self._round_step = -1  # there is no further round
        if rounds:
            self.event(f"the ranks can no longer switch knobs together: {rounds.failure}", "error")

    def _settle_own(self, ack: Ack) -> None:
        self._settle(ack)

    def _stop(self) -> None:
        self.stopping = True

    # ------------------------------------------------------------------------------------------ end

    def _leave(self) -> None:
        """Leave the run. Rank 0 leaves last, because the others need its hub for their last messages."""
        ranks, self._ranks = self._ranks, None
        if ranks and self._rounds:
            if self._hello.rank != LEADER:
                super()._leave()
                self.quietly(lambda: ranks.put("bye/" + str(ranks.rank), b""))
                self._closing.set()
                return self._rounds.close()
            with suppress(ClosedError, RuntimeError):  # the other ranks are gone, or continue without the run
                ranks.wait([f"bye/{rank}" for rank in range(1, ranks.world)], BYE_S)
            self._closing.set()
            self._rounds.close()
        return super()._leave()


def _total(records: list[Record]) -> dict[str, Traffic]:
    """Traffic of the job: bytes are summed over ranks, times are averaged."""
    total: dict[str, Traffic] = {}
    for record in records:
        for axis, one in record.comm.items():
            seen = total.get(axis, Traffic(0, 0.0, 0.0))
            ms, exposed = (one.ms / len(records), one.exposed_ms / len(records))
            total[axis] = Traffic(seen.bytes + one.bytes, seen.ms + ms, seen.exposed_ms + exposed)
    return total
