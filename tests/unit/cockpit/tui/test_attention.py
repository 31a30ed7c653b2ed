"""Tests how the cockpit draws its user's attention: with the terminal's title, its bell, and desktop notifications."""

import pytest

from agents.protocol import Alert
from cockpit.data.store import Store
from cockpit.tui.terminal.attention import RESTORE_TITLE, SAVE_TITLE, Attention, notifies, title_of
from tests.screens.fake_run import FakeRun

HOSTILE = "loss is nan\x07\x1b]2;owned\x07"


def stored() -> Store:
    store = Store(lambda: 100.0)
    store.apply(FakeRun(oversubscribed=False, slow_rank=None).story(10))
    store.set_message_age(0.1)
    return store


def alert(text: str, active: bool = True) -> Alert:
    return Alert("nan", "run", "error", active, 9, 0.0, text)


@pytest.mark.parametrize(
    ("environment", "known"),
    [
        ({"TERM_PROGRAM": "WezTerm"}, True),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color"}, False),
        ({"TERM_PROGRAM": "WezTerm", "TMUX": "/tmp/x"}, False),
        ({"TERM_PROGRAM": "iTerm.app", "TERM": "screen-256color"}, False),
        ({}, False),
    ],
)
def test_terminals_that_notify(environment: dict[str, str], known: bool) -> None:
    assert notifies(environment) is known


def test_the_title_follows_the_diagnosis_and_is_restored() -> None:
    written: list[str] = []
    attention, store = Attention(written.append, {}), stored()
    attention.update(store, lambda: None)
    attention.update(store, lambda: None)
    assert title_of(Store()) == "· WAITING · cockpit"
    assert written == [SAVE_TITLE, "\x1b]2;! BUBBLE-BOUND · demo · cockpit\x07"], "only once"
    store.apply([alert(HOSTILE)])
    attention.update(store, lambda: None)
    assert written[-1] == "\x1b]2;✗ LOSS NOT FINITE · demo · cockpit\x07"
    attention.close()
    assert written[-1] == RESTORE_TITLE


def test_a_severe_alert_rings_once_and_its_text_cannot_control_the_terminal() -> None:
    written: list[str] = []
    rung: list[bool] = []
    attention, store = Attention(written.append, {"TERM_PROGRAM": "WezTerm"}), stored()
    for _ in range(2):
        store.apply([alert(HOSTILE)])
        attention.update(store, lambda: rung.append(True))
    sent = [text for text in written if text.startswith("\x1b]9;")]
    assert len(rung) == len(sent) == 1
    assert sent[0].count("\x1b") == 1 and sent[0].count("\x07") == 1 and "demo: loss is nan" in sent[0]
    store.apply([alert(HOSTILE, active=False)])
    attention.update(store, lambda: rung.append(True))
    store.apply([alert(HOSTILE)])
    attention.update(store, lambda: rung.append(True))
    assert len(rung) == 2, "a new alert rings again"
