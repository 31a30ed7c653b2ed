"""Parsing of values that a user types, and the next value that an arrow key selects."""

from pathlib import Path

import pytest

from agents.protocol import KnobState, Legal, Value
from cockpit.cli.steer.steering import parse_changes
from cockpit.data.sources.connection import CockpitError
from cockpit.knobs.values import (
    candidates,
    change_text,
    fit,
    legal_text,
    only_value,
    parse,
    split_change,
    step,
    value_text,
)
from cockpit.tui.keys.dialog_bindings import BOARD
from cockpit.tui.keys.general_bindings import APP, PANELS, REPLAY
from cockpit.tui.keys.screen_bindings import GRID
from cockpit.tui.keys.user_keymap import KeymapError, load_keymap

MICRO = KnobState("micro_batches", 4, Legal([2, 4, 8, 16]), True)
CAPACITY = KnobState("capacity_factor", None, Legal(low=0.1, high=8.0, optional=True), False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("none", None), ("true", True), ("8", 8), ("-2", -2), ("1.25", 1.25), ("1e-3", 1e-3), ("full", "full")],
)
def test_parse(text: str, value: Value) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize("text", ["", "x", "=3", "x="])
def test_text_that_is_not_a_change(text: str) -> None:
    with pytest.raises(ValueError, match="knob=value"):
        split_change(text)


def test_stepping_stops_at_the_ends() -> None:
    assert [step(MICRO, 4, 1), step(MICRO, 16, 1), step(MICRO, 2, -1)] == [8, 16, 2]
    assert step(CAPACITY, None, -1) == 8.0
    assert None in candidates(CAPACITY)
    assert all(CAPACITY.legal.admits(value) for value in candidates(CAPACITY))


def test_an_integer_fits_a_float_knob() -> None:
    assert fit(KnobState("x", 0.5, Legal([0.5, 1.0]), True), 1) == 1.0
    assert fit(MICRO, 8) == 8


def test_values_that_differ_only_in_notation() -> None:
    recompute = KnobState("recompute", "full", Legal(["none", "selective", "full"]), True)
    assert fit(recompute, parse("none")) == "none"
    assert fit(CAPACITY, parse("none")) is None
    assert fit(MICRO, parse("8.0")) == 8 and type(fit(MICRO, parse("8.0"))) is int


@pytest.mark.parametrize("text", ["9" * 400, "1_0", "nan", "inf", "1e999", "0x10"])
def test_text_that_is_not_a_number_stays_text(text: str) -> None:
    assert parse(text) == text


def test_a_value_over_the_length_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        split_change(f"recompute={'x' * 10_000}")


def test_legal_text() -> None:
    assert legal_text(MICRO) == "2 4 8 16"
    assert legal_text(CAPACITY) == "0.1 .. 8 | none"


def test_an_action_has_no_value() -> None:
    save = KnobState("save", None, Legal([True]), True, action=True)
    place = KnobState("expert_placement", None, Legal(["load", "traffic"]), True, action=True)
    assert [value_text(knob) for knob in (MICRO, CAPACITY, save)] == ["4", "none", "·"]
    assert (only_value(save), only_value(place), only_value(MICRO)) == (True, None, None)
    assert change_text(save, True) == "save" and change_text(place, "load") == "expert_placement load"
    assert change_text(MICRO, 8) == "micro_batches 4→8"
    assert legal_text(place) == "load traffic" and step(save, None, 1) is True


def test_key_ids_are_unique_and_keys_avoid_terminal_prefixes() -> None:
    actions = [*APP, *PANELS, *GRID, *BOARD, *REPLAY]
    assert len({action.id for action in actions}) == len(actions)
    keys = {key for action in actions for key in action.keys.split(",")}
    assert not keys & {"ctrl+a", "ctrl+b"}
    assert not any(key.startswith("alt+") for key in keys)


def test_keymap_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_keymap(tmp_path / "absent.toml") == {}
    path = tmp_path / "keys.toml"
    path.write_text('"app.knobs" = "f5"\n')
    assert load_keymap(path) == {"app.knobs": "f5"}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "cockpit").mkdir()
    path.rename(tmp_path / "cockpit" / "keys.toml")
    assert load_keymap() == {"app.knobs": "f5"}
    path.write_text('"app.nothing" = "f5"\n')
    with pytest.raises(KeymapError, match=r"app\.nothing must be one of"):
        load_keymap(path)


def test_a_user_without_a_home_has_the_default_keys(homeless: None) -> None:
    assert load_keymap() == {}


def test_every_action_exists() -> None:
    from cockpit.tui.app import CockpitApp
    from cockpit.tui.dialogs.board import BoardScreen
    from cockpit.tui.replay import ReplayApp
    from cockpit.tui.screens.run_screen import RunScreen
    from cockpit.tui.widgets.ranks.grid import RankGrid

    owners = (CockpitApp, RunScreen, RankGrid, BoardScreen, ReplayApp)
    for actions, owner in zip((APP, PANELS, GRID, BOARD, REPLAY), owners, strict=True):
        for action in actions:
            assert hasattr(owner, f"action_{action.action.partition('(')[0]}"), action.id


def test_an_action_with_several_values_lists_them() -> None:
    place = KnobState("expert_placement", None, Legal(["load", "logical"]), True, action=True)
    with pytest.raises(CockpitError, match="legal: expert_placement=load, expert_placement=logical"):
        parse_changes(["expert_placement"], {"expert_placement": place})
