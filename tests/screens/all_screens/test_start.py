"""The cost of starting the app and of opening a screen, checked by counting operations such as imports, not by
measuring times."""

import subprocess
import sys
import time

import pytest
from textual.css import stylesheet
from textual.dom import DOMNode
from textual.geometry import Size
from textual.screen import Screen

from cockpit.tui.app import KEY_FIRST_S, MOST_MISSED
from cockpit.tui.terminal import pauses
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press


def test_a_start_imports_no_screen_but_the_first() -> None:
    code = "import sys, cockpit.tui.app as app; app.RUN_SCREENS[app.FIRST_SCREEN]; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = set(found.split())
    screens = {name for name in names if name.startswith("cockpit.tui.screens.")}
    assert screens == {f"cockpit.tui.screens.{name}" for name in ("screens", "run_screen", "overview")}
    assert names.isdisjoint(
        {"numpy", "torch", "importlib.metadata", "engine.config.layout", "cockpit.knobs.plan"}
    )


def test_collection_is_off_from_the_start_to_the_first_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(pauses.gc, name, lambda name=name: called.append(name))
    monkeypatch.setattr(pauses.gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    pauses.start_without_pauses()
    pauses.short_pauses()
    assert called == ["disable", "freeze", "enable"]


async def test_a_source_parsed_for_a_theme_is_not_parsed_again(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    parse = stylesheet.parse

    def counted(scope: str, css: str, read_from: object, **more: object) -> object:
        parsed.append((read_from, css, more["tie_breaker"]))
        return parse(scope, css, read_from, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(stylesheet, "parse", counted)
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        for key in "2345678":
            await press(cockpit, pilot, key)
        assert parsed and len(set(parsed)) == len(parsed)
        parsed.clear()
        await press(cockpit, pilot, "t")
        assert parsed  # another theme has other colours


async def test_a_new_size_matches_the_styles_of_a_screen_once(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await press(cockpit, pilot, "2")
        matched: list[DOMNode] = []
        monkeypatch.setattr(cockpit.app, "update_styles", lambda node, animate=True: matched.append(node))
        await pilot.resize_terminal(120, 36)
        assert matched.count(cockpit.app.screen) == 1


async def test_a_dialog_is_laid_out_for_its_size_once_and_the_screen_below_not_at_all(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "1")
        laid_out: list[Screen[object]] = []
        sized: list[Screen[object]] = []
        refresh = Screen._refresh_layout

        def counted(self: Screen[object], size: Size | None = None, scroll: bool = False) -> None:
            laid_out.append(self)
            if size is not None:
                sized.append(self)
            refresh(self, size, scroll)

        monkeypatch.setattr(Screen, "_refresh_layout", counted)
        below = cockpit.app.screen
        await press(cockpit, pilot, "question_mark")
        assert cockpit.app.screen is not below
        assert below not in laid_out and sized == [cockpit.app.screen]
        await pilot.resize_terminal(80, 24)
        assert below in sized and sized.count(cockpit.app.screen) == 2
        assert cockpit.app.screen.size == below.size == (80, 24)


async def test_a_key_is_painted_before_new_data_but_delays_it_only_briefly(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "2")
        cockpit.app._missed, updates = 0, []
        for _ in range(2 * (MOST_MISSED + 1)):
            cockpit.app.key_at = time.monotonic()  # a key that is held down
            before = cockpit.app._tick
            cockpit.app._refresh_if_free()
            updates.append(cockpit.app._tick - before)
        assert updates == 2 * [*[0] * MOST_MISSED, 1]
        cockpit.app.key_at -= KEY_FIRST_S
        before = cockpit.app._tick
        cockpit.app._refresh_if_free()
        assert cockpit.app._tick == before + 1


def test_garbage_is_collected_before_much_has_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(pauses.gc, "collect", lambda: collected.append(1))
    for count in (pauses.DUE - 1, pauses.DUE):
        monkeypatch.setattr(pauses.gc, "get_count", lambda count=count: (0, 0, count))
        pauses.collect_if_due()
    assert len(collected) == 1
