"""Tests of the texts about a run: its settings and, after its end, its results."""

from pathlib import Path

import pytest
from msgspec import structs

from agents.protocol import CHECKPOINT_STEP, Event, Gone, Hello, Update, Value
from agents.rundir.local_machine import this_host, this_machine
from cockpit.data.run_folders.final_summary import (
    duration_text,
    final_summary,
    has_ended,
    outcome_rows,
    plain_summary,
    title,
)
from cockpit.data.run_folders.run_files import read_files
from cockpit.data.run_folders.run_info import plain_info, run_info
from cockpit.data.sources.folders import told_folder
from cockpit.data.store import Store
from tests.screens.fake_run import START_S, FakeRun

STARTED: dict[str, Value] = {"release": "1.2", "user": "ada", "lr": 0.001, "warmup": 20, "torch": "2.13"}


def store_of(*more: Update, facts: dict[str, Value] | None = None, steps: int = 160) -> Store:
    store = Store()
    for update in FakeRun().story(steps, change_at=100):
        if isinstance(update, Hello):
            known = update.facts | (STARTED | (facts or {}) if update.leader else {})
            update = structs.replace(update, facts=known, began_s=START_S - 30.0)
        store.apply([update])
    store.apply(more)
    return store


def sections(store: Store, folder: Path | None = None) -> dict[str, dict[str, str]]:
    found = run_info(store, read_files(folder) if folder else None, "demo")
    return {section.title: {fact.label: fact.text for fact in section.facts} for section in found}


def test_overrides_are_what_differs_from_the_layout(tmp_path: Path) -> None:
    changed = {"micro_batches": "4 → 8 since step 100 by ada@login"}
    assert sections(store_of())["overrides in force"] == changed
    (tmp_path / "layout.toml").write_text(
        '[knobs]\nmicro_batches = 8\nlr_scale = 2.0\n[run]\nname = "\\u001b[b]x"\n'
    )
    found = sections(store_of(), tmp_path)
    # the run began with another value than the layout says
    assert found["overrides in force"] == {"lr_scale": "2 → 1"}
    assert found["layout as given"]["run.name"] == " [b]x"


def test_how_the_learning_rate_decays() -> None:
    wsd: dict[str, Value] = {"lr_schedule": "wsd", "lr_end": 0.1, "decay": 30}
    shown = sections(store_of(facts=wsd))["training"]["learning rate"]
    assert "then constant, then a linear decay over the last 30 steps to 0.0001 · now" in shown
    shown = sections(store_of(facts={"lr_schedule": "cosine"}))["training"]["learning rate"]
    assert "then a cosine decay · now" in shown  # an older run does not report its end
    shown = sections(store_of(facts={"lr_schedule": "later"}))["training"]["learning rate"]
    assert "then · · now" in shown


def test_versions_learning_rate_and_what_is_not_reported() -> None:
    found = sections(store_of())
    assert (
        found["training"]["learning rate"]
        == "0.001 after a linear warm-up of 20 steps, then constant · now 0.0003"
    )
    assert found["versions"]["run"] == "train-cockpit 1.2" and found["versions"]["torch of the run"] == "2.13"
    assert found["run"]["started by"] == "ada on node0"
    assert found["model"]["d_model"] == "·" and found["grid"]["grid"] == "pp 2 x dp 2 x tp 2 x ep 4"
    record = plain_info(run_info(store_of(), None, "demo"))
    assert record["model"]["d_model"] is None and record["grid"]["grid"] == {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "ep": 4,
    }


def test_existing_files(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("x" * 2048)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "hub.json").write_text("{")
    found = sections(store_of(), tmp_path)
    assert found["files"]["console output"] == f"{tmp_path / 'engine.log'} · 2.0 KiB"
    assert (
        found["files"]["checkpoints"] == str(tmp_path / "checkpoints") and found["files"]["recording"] == "·"
    )
    assert "is not a hub file" in found["connection"]["hub"]


def test_the_folder_that_the_leader_names_counts_only_on_its_machine(tmp_path: Path) -> None:
    store = store_of(facts={"folder": str(tmp_path)})
    assert told_folder(store) is None  # the leader runs on node0
    leader = structs.replace(store.state.hellos[0], host=this_host())
    store.apply([leader])
    assert told_folder(store) == tmp_path
    store.apply([structs.replace(leader, machine="another.machine.1")])
    assert told_folder(store) is None, "the machine has the same name"
    store.apply([structs.replace(leader, host="renamed", machine=this_machine())])
    assert told_folder(store) == tmp_path
    store.apply([structs.replace(leader, facts={"folder": f"{tmp_path}\0"})])
    assert told_folder(store) is None


def ended(clean: bool = True) -> list[Update]:
    return [Gone(rank, clean=clean, process="ended") for rank in range(8)]


def test_the_steps_are_those_whose_loss_is_shown() -> None:
    """When a rank is killed, the step records of other ranks may already be one step newer than the newest summary of a
    step over all ranks, which contains the loss."""
    store = store_of()
    newest = store.state.steps[3]
    store.apply([structs.replace(newest, step=newest.step + 1), *ended(clean=False)])
    assert final_summary(store).steps == 160


def test_the_time_of_a_run_counts_from_the_first_start_of_its_ranks() -> None:
    """After a change of the layout, the ranks are new processes."""
    store = store_of()
    began_s = store.state.hellos[0].began_s
    for hello in list(store.state.hellos.values()):
        store.apply([structs.replace(hello, earlier_s=1440.0)])
    wall_s = final_summary(store).wall_s
    assert wall_s == pytest.approx(1440.0 + 109.5)
    began = plain_info(run_info(store, None, "demo"))["run"]["began"]
    assert began == began_s - 1440.0
    assert sections(store)["run"]["began"].endswith(", 25 min 50 s to the newest step")


def test_a_final_summary_has_the_effect_of_each_change() -> None:
    saved = Event(START_S + 79, "info", "engine", "saved", {CHECKPOINT_STEP: 158})
    tried = FakeRun().trial("t", "reverted", 16, revision=9, ratio=1.02, low=1.0, high=1.04, why="not faster")
    store = store_of(saved, tried)
    assert not has_ended(store)
    store.apply(ended())
    assert has_ended(store)
    found = final_summary(store)
    rows = list(outcome_rows(found))
    assert rows[0] == ("steps", "160 of 300") and rows[1] == ("wall time", "1 min 50 s")
    assert rows[2][1].startswith("2.311") and ", lowest 2.2" in rows[2][1]
    assert rows[3] == ("checkpoint", "of step 158")
    assert rows[4][1].startswith("micro_batches 4→8 at step 100 by ada@login: step time 41")
    assert rows[5] == (
        "",
        "trial micro_batches 8→16 by bob@login: reverted, step time +2.0 % (95 %: +0.0 % to +4.0 %)",
    )
    record = plain_summary(found)
    assert record["changes"][0]["brought"][0]["quantity"] == "step_ms" and record["wall_s"] == pytest.approx(
        109.5
    )
    assert title(found) == "demo has ended"
    failed = store_of(*ended(clean=False))
    assert title(final_summary(failed)) == "demo has failed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.4 s"), (59.4, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (7200, "2 h"), (100_000, "1 d 3 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
