"""The log screen: list, details, filters, search, jump, and the console output."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.protocol import Alert, Event, Update, Value
from cockpit.data.run_folders.console import Console
from cockpit.tui.screens.run_screen import RunScreen
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown, until
from tests.screens.fake_run import START_S, FakeRun
from tests.screens.sizes import SIZES


def noted(number: int, level: str = "info") -> Event:
    return Event(START_S + 80 + number, level, "hub", f"{'abcdefghijklmnopqrstuvwxyz'[number % 26]} happened")  # type: ignore[arg-type]


def alerted(at_s: float, active: bool, step: int = 40) -> Event:
    facts = {"alert": "straggler", "subject": "rank 3", "active": active, "step": step, "rank": 3}
    return Event(START_S + at_s, "warning" if active else "info", "hub", "rank 3 is slow", facts)


def sample(at_s: float, text: str, step: int) -> Event:
    facts: dict[str, Value] = {
        "step": step,
        "sample": True,
        "prompt_tokens": 13,
        "prefill_tokens_per_s": 161.0,
    }
    facts |= {"decode_tokens_per_s": 7.3, "cache_bytes": 216320, "cache_bytes_formula": 216320}
    return Event(START_S + at_s, "info", "engine", text, facts)


def day(run: FakeRun) -> Iterator[Update]:
    """Log entries of each kind: a checkpoint, an alert that ends, repeated warnings, a resume, generated text, a trial,
    and an active alert."""

    def event(at_s: float, level: str, text: str, source: str = "hub", **facts: Value) -> Event:
        return Event(START_S + at_s, level, source, text, facts)  # type: ignore[arg-type]

    saved, resumed = {"checkpoint_step": 20}, {"checkpoint_step": 120, "resumed": True}
    slow = {"alert": "straggler", "subject": "rank 3", "rank": 3, "ranks": 1, "evidence.own_ms": 358.2}
    yield event(
        12, "info", "checkpoint of step 20: checkpoints/step-20, 10.0 MiB in 0.6 s", "rank 0", **saved
    )
    text = "rank 3 (pp0 dp1 tp1) has an own time of 358 ms a step, +37 % against the ranks with the same work"
    yield event(20, "warning", text, **slow, active=True, step=40)
    yield event(32, "info", f"over: {text}", **slow, active=False, step=64)
    for number in range(12):
        yield event(40 + number, "warning", f"rank 5: {number + 3} records were dropped", "rank 5")
    yield event(
        60, "info", "resumed from checkpoints/step-120, at revision 1 of the knobs", "rank 0", **resumed
    )
    yield sample(66, 'def __init__(self, name="[b]x[/b]"):\n    self.name = nam\\xff', step=132)
    measured = {"before_ms": 655.0, "after_ms": 612.0, "ratio": 0.934, "low": 0.92, "high": 0.95}
    yield run.trial("t1", "kept", 16, revision=2, time_s=START_S + 70, **measured)
    yield event(78, "error", "loss is nan at step 157", alert="nan", subject="run", active=True, step=157)


async def send(cockpit: Cockpit, pilot: object, *updates: Update) -> None:
    cockpit.source.send(iter(updates))
    await settle(cockpit, pilot)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
async def test_the_list_stays_where_it_was_scrolled_to(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "8")
        await send(cockpit, pilot, *map(noted, range(60)))
        assert "h happened" in screen_text(cockpit)  # the 60th
        await press(cockpit, pilot, "up", "up")
        before = [line for line in shown(cockpit.app) if " happened · hub" in line]
        await send(cockpit, pilot, *map(noted, range(60, 72)))
        after = [line for line in shown(cockpit.app) if " happened · hub" in line]
        assert after == before and "↓ 12 newer · 75 entries" in screen_text(cockpit)
        await press(cockpit, pilot, "G")
        assert "t happened" in screen_text(cockpit) and "newer" not in screen_text(cockpit)


async def test_filters_and_search(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await send(cockpit, pilot, noted(0), noted(1, "error"), alerted(90, True), alerted(91, False))
        await press(cockpit, pilot, "v")
        assert "Log · changes and trials" in screen_text(cockpit) and "a happened" not in screen_text(cockpit)
        await press(cockpit, pilot, "v", "e")
        assert "Log · alerts · warnings and errors" in screen_text(cockpit)
        assert "straggler for 1.0 s · rank 3 is slow" in screen_text(cockpit)
        await press(cockpit, pilot, "V", "V", "e")
        assert "Log · errors" in screen_text(cockpit) and "b happened" in screen_text(cockpit)
        await press(cockpit, pilot, "v")
        assert "no entries: changes and trials · errors · v and e show others" in screen_text(cockpit)
        await press(cockpit, pilot, "V", "e")

        await press(cockpit, pilot, "f", *"q1k", "backspace", "backspace", "backspace", *"A HAPP")
        # the keys of the app do nothing while a text is typed
        assert isinstance(cockpit.app.screen, RunScreen)
        assert "find A HAPP▏  1 line" in screen_text(cockpit) and "b happened" not in screen_text(cockpit)
        await press(cockpit, pilot, "enter", "escape")
        assert "b happened" in screen_text(cockpit) and cockpit.app.screen.NAME == "log"


async def test_enter_opens_the_screen_of_the_entry_at_its_step(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await press(cockpit, pilot, "up")
        text = screen_text(cockpit)
        assert "micro_batches 4→8 · applied 8/8 at step 100 · revision 1 · ada@login" in text
        assert "effect  step time 41" in text and "medians of 32 and 32 steps" in text
        await press(cockpit, pilot, "enter")
        assert cockpit.app.session.selection.step == 100
        assert isinstance(cockpit.app.screen, RunScreen) and cockpit.app.screen.NAME == "curves"
        await send(cockpit, pilot, alerted(95, True, step=150))
        await press(cockpit, pilot, "8")
        await press(cockpit, pilot, "G")
        assert "active since 22:14:55" in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        assert cockpit.app.screen.NAME == "ranks"
        assert (cockpit.app.session.selection.step, cockpit.app.session.selection.rank) == (150, 3)


async def test_a_generated_text_is_shown_line_by_line(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await send(cockpit, pilot, sample(80, "[b]def[/b]\x1b[2J f():\n    return 1", 157))
        lines = [line.strip("│ ") for line in screen_text(cockpit).splitlines()]
        assert any(
            line.endswith("157 · sample  “[b]def[/b] [2J f():↵    return 1” · engine") for line in lines
        )
        at = lines.index("[b]def[/b] [2J f():")
        assert lines[at + 1].strip() == "return 1" and "facts   prompt_tokens 13" in " ".join(lines[at:])
        await press(cockpit, pilot, "V", "V")
        assert "Log · generated text" in screen_text(cockpit)


async def test_the_console_output_is_followed_and_searched(make_cockpit: MakeCockpit, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"\x1b[3{n % 8}mline {n}\x1b[0m [b]\n" for n in range(100)))
    (tmp_path / "hub.log").write_text("the hub prints\n")
    cockpit = make_cockpit()
    cockpit.app.session.console.folder = tmp_path
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await press(cockpit, pilot, "tab")
        await until(cockpit.app, pilot, lambda: "line 99 [b]" in screen_text(cockpit))
        assert "engine.log (1 of 2)" in screen_text(cockpit)
        with log.open("a") as file:
            file.write("the end\n")
        await until(cockpit.app, pilot, lambda: "the end" in screen_text(cockpit))
        await press(cockpit, pilot, "f", *"line 7", "enter")
        assert "find line 7  11 lines" in screen_text(cockpit) and "line 78" in screen_text(cockpit)
        await press(cockpit, pilot, "escape", "o")
        await until(cockpit.app, pilot, lambda: "the hub prints" in screen_text(cockpit))


async def test_frozen_screens_keep_the_console_output(make_cockpit: MakeCockpit, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("line 1\n")
    cockpit = make_cockpit()
    console = cockpit.app.session.console
    console.folder = tmp_path
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await until(cockpit.app, pilot, lambda: "line 1" in screen_text(cockpit))
        await press(cockpit, pilot, "space")
        log.write_text("line 1\nline 2\n")
        console.read()
        await settle(cockpit, pilot)
        assert console.tail and len(console.tail.lines) == 2 and "line 2" not in screen_text(cockpit)
        await press(cockpit, pilot, "space")
        await until(cockpit.app, pilot, lambda: "line 2" in screen_text(cockpit))


async def test_output_on_another_machine_is_named(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await press(cockpit, pilot, "8")
        assert "the run's folder is not on this machine; on node0: tail -f engine.log" in screen_text(cockpit)
        await pilot.resize_terminal(20, 5)
        await press(cockpit, pilot, "tab", "down", "w", "f", "x", "escape", "z", "z")
        await pilot.resize_terminal(80, 24)
        await press(cockpit, pilot, "tab")
        assert "micro_batches 4→8" in screen_text(cockpit)


def hostile() -> Iterator[Update]:
    text = "\x1b]0;title\x07[red]x[/red] \u202e" + "w" * 4000
    yield Event(1e20, "error", "[b]", text, {"alert": "\x1b[2J", "subject": text[:64], "active": True})
    yield Event(-1e20, "info", "", "", {"checkpoint_step": -3, "[i]": text[:200]})
    yield Alert("\x1b", "\x1b", "error", True, 0, 0.0, text)


async def test_hostile_text_and_times(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "8")
        await send(cockpit, pilot, *hostile())
        for keys in (("up",), ("w",), ("z",), ("v", "v"), ("enter",)):
            await press(cockpit, pilot, *keys)
            assert "\x1b" not in screen_text(cockpit) and "\x07" not in screen_text(cockpit)
        assert isinstance(cockpit.app.screen, RunScreen)


def test_a_console_without_a_folder_reads_nothing() -> None:
    console = Console()
    console.look()
    console.read()
    assert console.tail is None and console._thread is None


async def test_details_use_the_height_that_a_short_list_leaves_free(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=0)
    facts: dict[str, Value] = {"alert": "straggler", "subject": "rank 3", "active": True, "rank": 3}
    facts |= {f"evidence.of_a_slow_rank_{number}": 1.5 * number for number in range(12)}
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "8")
        await send(cockpit, pilot, Event(START_S + 1, "warning", "hub", "rank 3 is slow", facts))
        assert "evidence.of_a_slow_rank_11" in screen_text(cockpit)
