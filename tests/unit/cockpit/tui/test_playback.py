"""The position line of a replay, and the panels of a recording that has lost records or ended early."""

import pytest
from msgspec import structs

from agents.protocol import Gone, Hello
from cockpit.data.diagnosis.statement import Level
from cockpit.data.link import PlaybackPosition
from cockpit.data.ranks.rank_facts import no_record
from cockpit.data.store import Store
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.outcome import outcome_level
from cockpit.tui.widgets.scrubber import scrub_line
from tests.screens.fake_run import FakeRun

COLOURS = palette("cockpit-dark")


def played(thinned: bool = False, steps: int = 10) -> Store:
    store = Store(lambda: 100.0)
    store.apply(FakeRun(oversubscribed=False).story(steps))
    store.playback_position = PlaybackPosition(30.0, 0.0, 915.0, 1.0, paused=False, thinned=thinned)
    return store


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("thinned", [False, True])
def test_the_position_and_its_note_fit_the_line(width: int, thinned: bool) -> None:
    """For a thinned recording, the note that it has no rank records must not extend beyond the right edge of the
    line."""
    text = scrub_line(played(thinned), width, COLOURS).strip(width, COLOURS.text).text.rstrip()
    assert text.endswith("0:30 / 15:15" + " · no rank records" * thinned)
    assert ("●" in text) is (width > 80 or not thinned)


def test_a_thinned_recording_is_not_a_rank_that_has_sent_nothing_yet() -> None:
    assert no_record(played()) == "no step record yet"
    assert no_record(played(thinned=True)).startswith("the recording keeps no records of single ranks")


@pytest.mark.parametrize(("planned", "level"), [(10, Level.GOOD), (300, Level.NOTE)])
def test_a_run_that_stopped_early_has_no_green_tick(planned: int, level: Level) -> None:
    store = played()
    for hello in list(store.state.hellos.values()):
        store.apply([structs.replace(hello, facts={**hello.facts, "steps": planned}), Gone(hello.rank, True)])
    assert isinstance(hello, Hello) and outcome_level(store) is level
