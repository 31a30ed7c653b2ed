"""The knob board: a change is checked as a whole before it is committed, and a refused change has no effect."""

import pytest

from agents.protocol import Legal
from agents.rank.knob_board import Knob, KnobBoard, Values


def make(log: list[object]) -> KnobBoard:
    def build(values: Values) -> object:
        if values["recompute"] == "full" and values["micro_batches"] == 1:
            raise ValueError("out of memory")
        return values["micro_batches"]

    return KnobBoard(
        [
            Knob(
                "schedule", lambda _: Legal(["gpipe", "zbv"]), True, "", log.append, lambda v: v["schedule"]
            ),
            Knob(
                "micro_batches",
                # The legal counts depend on the schedule after the change.
                lambda values: Legal([2, 4] if values["schedule"] == "zbv" else [1, 2, 4]),
                True,
                "",
                log.append,
                build,
            ),
            Knob("recompute", lambda _: Legal(["none", "full"]), True, "", log.append, build),
        ],
        {"schedule": "gpipe", "micro_batches": 1, "recompute": "none"},
    )


def test_a_change_is_checked_on_the_resulting_board() -> None:
    board = make([])
    with pytest.raises(ValueError, match="micro_batches = 1 is not legal; legal: 2, 4"):
        board.prepare({"schedule": "zbv"})
    board.prepare({"schedule": "zbv", "micro_batches": 2})


def test_an_unknown_knob_names_the_knobs() -> None:
    with pytest.raises(ValueError, match="no knob mb; the knobs are schedule, micro_batches, recompute"):
        make([]).prepare({"mb": 1})


def test_commit_swaps_all_values_and_prepare_none() -> None:
    log: list[object] = []
    board = make(log)
    prepared = board.prepare({"schedule": "zbv", "micro_batches": 4})
    assert log == [] and board.values["micro_batches"] == 1
    board.commit(7, {"schedule": "zbv", "micro_batches": 4}, prepared)
    assert log == ["zbv", 4]
    assert (board.revision, board.values["schedule"], board.values["micro_batches"]) == (7, "zbv", 4)


def test_a_refusal_in_prepare_changes_nothing() -> None:
    log: list[object] = []
    board = make(log)
    with pytest.raises(ValueError, match="out of memory"):
        board.prepare({"recompute": "full"})
    assert log == [] and board.revision == 0


def test_digests_are_equal_if_and_only_if_revision_and_values_are() -> None:
    one, other = make([]), make([])
    assert one.digest() == other.digest()
    for revision, board in ((1, one), (2, other)):
        board.commit(revision, {"micro_batches": 2}, board.prepare({"micro_batches": 2}))
    assert one.digest() != other.digest()


def test_states_show_the_current_legal_values() -> None:
    states = {state.name: state for state in make([]).states()}
    assert states["micro_batches"].legal.choices == [1, 2, 4]
    assert states["micro_batches"].refusal(3) == "micro_batches = 3 is not legal; legal: 1, 2, 4"


def test_an_action_is_requested_and_stores_no_value() -> None:
    log: list[object] = []
    save = Knob("save", lambda _: Legal([True]), True, "", log.append, lambda v: v["save"], action=True)
    board = KnobBoard([save], {})
    board.commit(1, {"save": True}, board.prepare({"save": True}))
    assert log == [True] and board.values == {} and board.revision == 1
    assert board.states()[0].action and board.states()[0].value is None
    with pytest.raises(ValueError, match="save = false is not legal; legal: true"):
        board.prepare({"save": False})


def test_a_value_is_stored_as_its_knob_casts_it() -> None:
    knob = Knob("n", lambda _: Legal(low=1, high=8), True, "", lambda _: None, lambda v: v["n"], cast=int)
    board = KnobBoard([knob], {"n": 1})
    [(_, built)] = board.prepare({"n": 2.0})
    board.commit(1, {"n": 2.0}, [])
    assert type(built) is int and type(board.values["n"]) is int
