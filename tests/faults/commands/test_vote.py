"""Faults 14 and 18 of docs/evidence/faults.md: all ranks apply a change at the same step, or no rank applies it."""

from torch import Tensor

from agents.protocol import Ack, Command, Legal
from agents.rank.knob_board import Knob, KnobBoard, Values
from engine.control.vote import KnobVote
from engine.parallel.collectives import AsyncCollective
from tests.unit.engine.parallel.thread_axis import ThreadAxis, on_each


class Ballot(ThreadAxis):
    """A process group for the vote on a knob change, whose ranks are threads of this process."""

    def start_broadcast(self, x: Tensor, root: int) -> AsyncCollective:
        x.copy_(self._all(x)[root]) if x.numel() else None
        return AsyncCollective(self, "broadcast", 0, ())


def paired_board(refuses: bool = False) -> KnobBoard:
    """A knob board with the knobs `width` and `mode`; the legal values of `width` depend on the value of `mode`."""

    def prepare(values: Values) -> object:
        if refuses:
            raise ValueError("no memory left")
        return values["width"]

    def legal(values: Values) -> Legal:
        return Legal([1, 2] if values["mode"] == "narrow" else [1, 2, 4])

    return KnobBoard(
        [
            Knob("width", legal, True, "", lambda _: None, prepare),
            Knob("mode", lambda _: Legal(["narrow", "wide"]), True, "", lambda _: None, lambda _: None),
        ],
        {"width": 1, "mode": "narrow"},
    )


def vote(command: Command, refuses: int | None = None, ranks: int = 4) -> list[tuple[KnobBoard, list[Ack]]]:
    """Let the ranks vote on `command` at the end of one step. If `refuses` is given, the rank with this number votes
    against the command. Returns, for each rank, its knob board (the knobs with their values) and its acks.
    """

    def rank(axis: ThreadAxis) -> tuple[KnobBoard, list[Ack]]:
        board, said = paired_board(axis.rank == refuses), []
        axis = Ballot(axis.rank, axis.size, axis._box, axis._barrier)
        switch = KnobVote(axis, board, lambda: None if said else command, said.append)
        switch.begin(7, stop=False)
        assert not switch.end(7)
        return board, said

    return on_each(ranks, rank)


def test_with_one_vote_against_no_rank_switches() -> None:
    ranks = vote(Command(1, "a", {"width": 2, "mode": "wide"}), refuses=2)
    assert {board.digest() for board, _ in ranks} == {paired_board().digest()}
    (ack,) = ranks[0][1]
    assert (ack.state, ack.why) == ("rejected", "rank 2: no memory left")
    assert not any(said for _, said in ranks[1:])


def test_with_all_votes_all_ranks_switch_at_one_step() -> None:
    ranks = vote(Command(1, "a", {"width": 4, "mode": "wide"}))
    assert len({board.digest() for board, _ in ranks}) == 1 and ranks[0][0].values["width"] == 4
    assert [(ack.state, ack.step, ack.before) for _, (ack,) in ranks] == [
        ("applied", 8, {"width": 1, "mode": "narrow"})
    ] * 4


def test_an_illegal_combination_never_reaches_a_vote() -> None:
    ranks = vote(Command(1, "a", {"width": 4, "mode": "narrow"}))
    (ack,) = ranks[0][1]
    assert (ack.state, ack.why) == ("rejected", "width = 4 is not legal; legal: 1, 2")
    assert {board.digest() for board, _ in ranks} == {paired_board().digest()}
