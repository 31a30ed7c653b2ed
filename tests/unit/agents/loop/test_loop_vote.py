"""The vote of the ranks at the end of a step: a rank votes even if the program's functions, the log or the agent fail
on this rank."""

import logging
import threading
from typing import Any

import pytest

import agents
from agents.loop.vote import Agreement, Disagreement, RankStep
from agents.protocol import Ack, Command, Legal
from agents.rank.knob_board import Knob, KnobBoard
from agents.rank.received_commands import ReceivedCommands
from tests.unit.agents.loop.test_loop import DEADLINE_S, Around


class Wordless(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr either")

    __str__ = __repr__


class Abandoned(BaseException):
    """A BaseException that is not an Exception, like those that frameworks raise to cancel work."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Wordless(), "k was not applied: Wordless (its repr fails)"),
        (OSError(2, "gone", "caf\udce9"), "k was not applied: FileNotFoundError(2, 'gone')"),
        (Abandoned("cancelled"), "k was not applied: Abandoned('cancelled')"),
    ],
)
def test_a_rank_keeps_voting_whatever_apply_raises(error: BaseException, why: str) -> None:
    around = Around(2)
    acks: list[Ack] = []
    raised: list[BaseException] = []
    values: dict[int, object] = {}

    def train(rank: int) -> None:
        def turn(value: int) -> None:
            if rank == 1 and value == 2:
                raise error

        with agents.join("r", rank, 2, agree=around.of(rank), hub="none") as loop:
            if rank == 1:
                loop._agent.settle = acks.append  # type: ignore[method-assign]
            loop.knob("k", int, legal=[1, 2, 8], value=1, apply=turn, loss_neutral=True)
            for revision, value in ((1, 2), (2, 8)):
                if rank == 0:
                    loop._agent._orders = ReceivedCommands()
                    loop._agent._orders.receive(Command(revision, "c", {"k": value}), loop._hello, None)
                try:
                    with loop.step():
                        pass
                except Abandoned as interrupt:
                    raised.append(interrupt)
            values[rank] = loop._board.values["k"], loop._board.revision

    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(2 * DEADLINE_S)
    assert values == {0: (8, 2), 1: (8, 2)}
    assert [(ack.state, ack.why) for ack in acks] == [("rejected", why), ("applied", "")]
    assert raised == ([error] if isinstance(error, Abandoned) else [])


STEP = RankStep(5, 1.0, None, None, None, None)


def board(commits: list[Any], legal: list[Any]) -> KnobBoard:
    knob = Knob("k", lambda _: Legal(legal), True, "", commits.append, lambda values: values["k"])
    return KnobBoard([knob], {"k": 1})


def agreement(
    rank: int, said: list[list[bytes]], board: KnobBoard, acks: list[Ack], waits: Command | None
) -> Agreement:
    answers = iter(said)

    def agree(mine: bytes) -> list[bytes]:
        answer = list(next(answers))
        answer[rank] = mine
        return answer

    return Agreement(rank, 2, agree, board, lambda: waits, acks.append)


def test_one_vote_against_stops_the_change_on_all_ranks() -> None:
    import msgspec

    command = Command(7, "c", {"k": 2})
    other = msgspec.msgpack.encode(STEP)
    commits: list[Any] = []
    acks: list[Ack] = []
    leader = agreement(0, [[b"", other], [b"", b"out of memory"]], board(commits, [1, 2]), acks, command)
    leader.step(STEP)
    assert commits == [] and [(ack.state, ack.why) for ack in acks] == [("rejected", "rank 1: out of memory")]
    # If a rank other than the leader cannot apply the change, it reports this and keeps its value.
    word = msgspec.msgpack.encode(msgspec.structs.replace(STEP, command=command))
    follower = agreement(1, [[word, b""], [b"", b""]], board(commits, [1]), acks, None)
    follower.step(STEP)
    assert commits == [] and len(acks) == 1


@pytest.mark.parametrize("error", [Wordless(), ValueError("caf\udce9 \0"), Abandoned()])
def test_a_rank_votes_whatever_its_knob_raises(error: BaseException) -> None:
    """The other ranks wait for this rank's vote, so the rank must vote even if the program's function for the knob's
    legal values raises an error."""
    import msgspec

    def legal(_: object) -> Legal:
        raise error

    votes: list[bytes] = []
    said = [msgspec.msgpack.encode(msgspec.structs.replace(STEP, command=Command(7, "c", {"k": 2}))), b""]

    def agree(mine: bytes) -> list[bytes]:
        votes.append(mine)
        return [said[0], mine] if len(votes) == 1 else [b"", mine]

    board = KnobBoard([Knob("k", legal, True, "", lambda _: None, lambda values: values["k"])], {"k": 1})
    Agreement(1, 2, agree, board, lambda: None, [].append).step(STEP)
    assert len(votes) == 2 and votes[1] and b"\0" not in votes[1]


def test_failures_outside_the_exchange_do_not_end_the_agreement(caplog: pytest.LogCaptureFixture) -> None:
    """An invalid step number, a failing log handler or a failing agent does not stop the ranks from agreeing on
    changes."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("a failing log handler")

    def fails(*_: object) -> None:
        raise RuntimeError("no queue")

    handler = Failing()
    logging.getLogger("agents").addHandler(handler)
    try:
        with agents.join("r", hub="none") as loop:
            loop.knob("k", int, legal=[1, 2], value=1, apply=lambda _: 1 / 0, loss_neutral=True)
            loop._agent._orders.receive(Command(3, "c", {"k": 2}), loop._hello, None)
            loop._agent.settle = loop._agent.introduce = fails  # type: ignore[method-assign]
            for number in (10**30, "seven", None):
                with loop.step(number):  # type: ignore[arg-type]
                    pass
            assert loop._agreement is not None and loop._board.revision == 3
    finally:
        logging.getLogger("agents").removeHandler(handler)


def test_bytes_of_another_run_end_the_agreement_but_not_the_run() -> None:
    acks: list[Ack] = []
    with pytest.raises(Disagreement, match="returned bytes of 2 ranks, but the run has 3"):
        Agreement(0, 3, lambda mine: [mine, mine], board([], [1]), lambda: None, acks.append).step(STEP)
    with pytest.raises(Disagreement, match="no rank of this run sent"):
        agreement(0, [[b"", b"\xc1"]], board([], [1]), acks, None).step(STEP)
