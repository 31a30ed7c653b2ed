"""Errors with checkpoints: resuming with a different model, and saving to a folder that cannot be created or
written."""

import json
from pathlib import Path

import pytest

from engine.checkpoint.manifest import PARTIAL
from tests.ranks.checkpoint.test_resume import SMALLER, steps_of
from tests.ranks.launch.test_run import DEMO, engine
from tests.ranks.program import run


@pytest.mark.xdist_group("saved")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["model.layers=3"], ["model.layers = 2, the layout has 3"]),
        pytest.param(["run.seed=7"], ["run.seed = 1, the layout has 7"], marks=pytest.mark.exhaustive),
        pytest.param(
            ["train.optimizer=sgd"],
            ["train.optimizer = adamw, the layout has sgd"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(["model.moe=none", "grid.ep=1"], ["model.moe"], marks=pytest.mark.exhaustive),
        (["train.steps=2"], ["step-2 is of step 2", "legal: a larger train.steps"]),
    ],
)
def test_another_model_is_refused_in_one_sentence(
    saved: Path, arguments: list[str], names: list[str]
) -> None:
    refused = run(*engine(DEMO, *SMALLER, *arguments, "--run-dir", str(saved), "--resume"), timeout=120)
    assert refused.returncode == 2 and refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert all(name in refused.stderr for name in names), refused.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended after two steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    done = run(*engine(DEMO, *SMALLER, "train.steps=2", "--run-dir", str(folder)), timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_save_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    """Ordinary files already have the names of the checkpoint folders, so no rank can save. Training continues until
    the last step, and the exit status says that the last checkpoint is missing."""
    checkpoints_dir = tmp_path / "checkpoints/run"
    checkpoints_dir.mkdir(parents=True)
    for step in (2, 4):
        (checkpoints_dir / f"step-{step}{PARTIAL}").write_text("")
    blocked = [
        f"checkpoint.dir={checkpoints_dir.parent}",
        "train.steps=4",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = run(*engine(DEMO, *SMALLER, *blocked), timeout=120)
    assert done.returncode == 1 and "the last checkpoint was not saved" in done.stderr, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(steps_of(events)) == [0, 1, 2, 3]
    failed = [event for event in events if event["event"] == "checkpoint"]
    assert [event["step"] for event in failed] == [2, 4]
    assert all("File exists" in event["why"] and event["folder"] is None for event in failed)


def test_a_checkpoints_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    blocked = [f"checkpoint.dir={tmp_path}/blocked/checkpoints", f"run.dir={tmp_path}/runs"]
    refused = run(*engine(DEMO, *SMALLER, *blocked), timeout=120)
    assert refused.returncode == 2 and refused.stdout == ""
    assert (
        refused.stderr
        == f"cannot create the folder of checkpoints {tmp_path}/blocked/checkpoints: Not a directory\n"
    )
    assert not (tmp_path / "runs").exists()
