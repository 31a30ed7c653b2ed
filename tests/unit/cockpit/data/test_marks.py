"""Marks: names, notes, and the file in the run's folder, which another user or another cockpit may write."""

import json
import os
from pathlib import Path

import pytest

from cockpit.data.log.run_log import marks
from cockpit.data.marks import FILE, MOST, MarkError, NamedMarks
from cockpit.data.store import Store
from cockpit.tui.session import Selection
from cockpit.tui.widgets.curves.loss_and_throughput import LOSS, CurvePanel
from tests.screens.fake_run import FakeRun


def opened(folder: Path) -> NamedMarks:
    found = NamedMarks()
    found.open(folder)
    return found


def test_marks_are_kept_in_the_folder_of_the_run(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.note == ""
    first.set("b", 20, "spike\x1b[2J")
    second.set("a", 30)
    assert second.free_name() == "c", "the other cockpit's mark is known"
    first.set("b", 25, "moved")
    assert [(one.name, one.step, one.note) for one in opened(tmp_path)] == [("b", 25, "moved"), ("a", 30, "")]
    assert second.remove("b") and not second.remove("b")
    assert [one.name for one in opened(tmp_path)] == ["a"]
    assert os.listdir(tmp_path) == [FILE], "no unfinished file stays"


def test_without_a_folder_or_permission_marks_stay_in_memory(tmp_path: Path) -> None:
    assert "not on this machine" in NamedMarks().note
    found = opened(tmp_path / "gone")
    found.set("a", 3)
    assert "cannot be written: No such file" in found.note and "last until this cockpit exits" in found.note
    assert found.get("a")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "is not a file of marks"),
        (b'{"marks": [{"name": "a", "step": -1}]}', "is not a file of marks"),
        (json.dumps({"marks": [{"name": "a", "step": 1}] * (MOST + 1)}).encode(), "is not a file of marks"),
        (b" " * (300 << 10), "cannot be read: larger than"),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    found = opened(tmp_path)
    assert why in found.note and found.note.isprintable()
    found.set("a", 3)
    assert path.read_bytes() == content


def test_hostile_marks(tmp_path: Path) -> None:
    hostile = [{"name": "x y", "step": 1}, {"name": "a", "step": 2, "note": "[/x]\x1b[31m"}]
    (tmp_path / FILE).write_text(json.dumps({"marks": hostile}))
    (mark,) = opened(tmp_path)
    assert mark.text == "'a [/x] [31m"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(tmp_path / "pipe")
    assert "not a regular file" in opened(tmp_path).note


@pytest.mark.parametrize("name", ["", "two words", "x" * 17, "é", "a\n", "../a"])
def test_names(name: str) -> None:
    with pytest.raises(MarkError, match="a mark's name has 1 to 16 letters"):
        NamedMarks().set(name, 1)


def test_marks_are_beside_knob_changes_on_curves_and_in_a_frozen_copy() -> None:
    store = Store()
    store.apply(FakeRun().story(20, change_at=10))
    frozen = store.frozen()
    before = frozen.revisions.copy()
    store.named_marks.set("a", 5, "odd")
    frozen.marked()
    assert [(mark.step, mark.label) for mark in marks(frozen)] == [(5, "'a odd"), (10, "micro_batches 4→8")]
    assert frozen.revisions != before and marks(store) == marks(frozen)


def test_the_newest_mark_under_the_loss_is_not_after_the_step_of_a_replay() -> None:
    store = Store()
    store.apply(FakeRun().story(20, change_at=10))
    store.named_marks.set("later", 90)
    store.marked()
    assert CurvePanel(LOSS, Selection()).subtitle(store) == "╷ step 10: micro_batches 4→8"
