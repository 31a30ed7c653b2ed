"""The `:` prompt: which target each input names, and the messages for invalid input."""

import pytest

from cockpit.data.navigation.jump import Jump, JumpError, jump_completions, parse_jump
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun

SCREENS = ("overview", "ranks", "log")


@pytest.fixture(scope="module")
def store() -> Store:
    store = Store()
    store.apply(FakeRun().story(6))
    store.named_marks.set("odd", 3)
    return store


@pytest.mark.parametrize(
    ("text", "jump"),
    [
        (" 5 ", Jump(step=5)),
        ("step  4", Jump(step=4)),
        ("LAST", Jump(last=True)),
        ("rank 7", Jump(rank=7, screen="ranks")),
        ("r7", Jump(rank=7, screen="ranks")),
        ("layer 3", Jump(layer=3, screen="experts")),
        ("expert 3.7", Jump(layer=3, expert=7, screen="experts")),
        ("mark odd", Jump(step=3)),
        ("'odd", Jump(step=3)),
        ("Log", Jump(screen="log")),
    ],
)
def test_jumps(store: Store, text: str, jump: Jump) -> None:
    assert parse_jump(text, store, SCREENS) == jump


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("6", "there is no step 6: the newest is 5"),
        ("9" * 15, "there is no step"),
        ("9" * 16, "is not a place to jump to"),
        ("rank 8", "there is no rank 8; legal: 0 to 7"),
        ("layer 4", "layer 4 has no experts; layers with experts: 0 to 3"),
        ("expert 3.8", "layer 3 has no expert 8; legal: 0 to 7"),
        ("expert 7", "'expert 7' is not a place to jump to; legal: a step such as 120, last, rank 17"),
        ("mark Odd", "there is no mark 'Odd'; marks: odd"),
        ("\x1b]0;x\x07", "' ]0;x ' is not a place to jump to"),
        ("٣", "is not a place to jump to"),
        ("rank 1" + "1" * 1000, "more than 100 characters"),
    ],
)
def test_missing_targets(store: Store, text: str, sentence: str) -> None:
    with pytest.raises(JumpError) as caught:
        parse_jump(text, store, SCREENS)
    assert sentence in str(caught.value) and str(caught.value).isprintable()


def test_a_recording_may_have_later_steps(store: Store) -> None:
    assert parse_jump("6", store, SCREENS, any_step=True) == Jump(step=6)


def test_a_run_without_experts_or_steps() -> None:
    store = Store()
    store.apply(FakeRun().begin())
    with pytest.raises(JumpError, match="no expert layer has reported"):
        parse_jump("layer 0", store, SCREENS)
    with pytest.raises(JumpError, match="no step is done yet"):
        parse_jump("0", store, SCREENS)


def test_completions(store: Store) -> None:
    assert jump_completions("ma", store, SCREENS) == ["mark ", "mark odd"]
    assert jump_completions("r", store, SCREENS) == ["rank ", "ranks"]
