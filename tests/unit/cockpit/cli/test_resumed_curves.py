"""Exports and mirrors of a run that resumed from an earlier checkpoint, read back by each program's own library."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from cockpit.cli.main import run
from cockpit.export.curves import CurveWriter, TensorBoardWriter, WandbWriter, numbers
from tests.unit.agents.conftest import make_run
from tests.unit.agents.fleet import make_hello, make_summary
from tests.unit.agents.recorder_run import MakeRun
from tests.unit.cockpit.cli.test_export import records_of

__all__ = ["make_run"]

STEPS = [
    *range(8),
    5,
    6,
    3,
    4,
    5,
]  # 0 to 7, then again from 5, then again from 3, which is the newest attempt
KEPT = {0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0, 4: 3.0, 5: 3.0}  # the loss of each step is the number of its attempt
LOSSES = [1.0] * 8 + [2.0] * 2 + [3.0] * 3
SUMMARIES = [
    structs.replace(make_summary(step), loss=loss, time_s=float(at))
    for at, (step, loss) in enumerate(zip(STEPS, LOSSES, strict=True))
]
Curve = list[tuple[int, float]]


@pytest.fixture
def recorded(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recorded run."""
    made = make_run()
    made.begin()
    made.tell(*SUMMARIES)
    made.recorder.close()
    monkeypatch.setenv("COCKPIT_RUNS", str(made.path.parent.parent))
    return made.path.parent


def in_file(folder: Path) -> Curve:
    """The loss in the only event file of a folder, as a reader gets it that does not know about restarts."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (path,) = folder.glob("events.out.tfevents.*")
    return [
        (event.step, value.tensor.float_val[0])
        for event in loader.EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "train/loss"
    ]


def in_tensorboard(folder: Path) -> Iterator[dict[int, float]]:
    """The loss that TensorBoard's two Python readers get from a folder: the one that scripts use, and the one of
    TensorBoard without its own data server."""
    processing = "tensorboard.backend.event_processing"
    scripts = pytest.importorskip(f"{processing}.event_accumulator")
    read = scripts.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    yield _distinct([(event.step, event.value) for event in read.Scalars("train/loss")])
    server = pytest.importorskip(f"{processing}.plugin_event_accumulator")
    read = server.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    yield _distinct([(event.step, event.tensor_proto.float_val[0]) for event in read.Tensors("train/loss")])


def _distinct(points: Curve) -> dict[int, float]:
    assert len(points) == len(dict(points)), points
    return dict(points)


def in_wandb(folder: Path) -> list[Curve]:
    """The loss in each W&B run of a folder, oldest first."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    curves = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        records = [internal.Record.FromString(record) for record in records_of(path)]
        rows = [
            {
                item.nested_key[0] if item.nested_key else item.key: item.value_json
                for item in one.history.item
            }
            for one in records
            if one.WhichOneof("record_type") == "history"
        ]
        curves.append([(json.loads(row["step"]), json.loads(row["train/loss"])) for row in rows])
    return curves


def test_an_export_has_the_newest_attempt_of_each_step_only(recorded: Path, tmp_path: Path) -> None:
    for form in ("tensorboard", "wandb"):
        assert run(["export", str(recorded), "--format", form, "--out", str(tmp_path / form)]) == 0
    assert in_file(tmp_path / "tensorboard") == list(KEPT.items())
    assert in_wandb(tmp_path / "wandb") == [list(KEPT.items())]


def test_a_second_export_into_a_folder_replaces_the_first(recorded: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(["export", str(recorded), "--format", "tensorboard", "--out", str(tmp_path / "tb")]) == 0
    assert list(in_tensorboard(tmp_path / "tb")) == [KEPT, KEPT]


def mirrored(writer: CurveWriter) -> None:
    """Write the summaries as a mirror does that gets the first two attempts in one part."""
    points = [(summary, numbers(summary, False)) for summary in SUMMARIES]
    for part in (points[:9], points[9:12], points[12:]):
        assert writer.write(part) == sum(len(values) for _, values in part)
    writer.close()


def test_a_tensorboard_mirror_marks_each_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    mirrored(TensorBoardWriter(tmp_path))
    assert list(in_tensorboard(tmp_path)) == [KEPT, KEPT]


ATTEMPTS = [[(step, 1.0) for step in range(8)], [(5, 2.0), (6, 2.0)], [(3, 3.0), (4, 3.0), (5, 3.0)]]


def test_a_wandb_mirror_has_a_run_for_each_attempt(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    mirrored(WandbWriter(tmp_path, make_hello(0, 1), "offline"))
    assert in_wandb(tmp_path) == ATTEMPTS


def test_an_mlflow_mirror_has_a_run_for_each_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from cockpit.export.mirror.mlflow_writer import MlflowWriter

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mirrored(MlflowWriter(tmp_path.as_uri(), make_hello(0, 1)))
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'cockpit'")
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert {one.info.run_name for one in found} == {"r", "r from step 5", "r from step 3"}
    assert {one.info.status for one in found} == {"FINISHED"}
    curves = [
        [(point.step, point.value) for point in client.get_metric_history(one.info.run_id, "train/loss")]
        for one in found
    ]
    assert sorted(curves) == sorted(ATTEMPTS)
