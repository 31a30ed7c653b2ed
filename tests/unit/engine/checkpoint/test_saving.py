"""Saving and loading checkpoints in a run with one rank in this process."""

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import engine.checkpoint.save as saving
from agents.protocol import Ack, Changes, Command
from agents.rank.agent import Agent
from engine.checkpoint.host_copy import HostCopy
from engine.checkpoint.manifest import PARTIAL
from engine.checkpoint.reading import damage, read
from engine.checkpoint.storage import Writer
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.parallel.local_shards import local_shard
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO

LAYOUT = load(DEMO, [*SMALL, "train.steps=2"])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> saving.Checkpoints:
    """The checkpoints of a run, with `write` replaced by a fast stub."""
    found = Trainer(LAYOUT, checkpoints_dir=tmp_path / "checkpoints").saving.checkpoints
    assert found
    monkeypatch.setattr(found, "write", lambda _, partial: partial.mkdir(parents=True) or {})
    return found


def test_a_save_that_finishes_during_take_finished_is_reported_later(
    checkpoints: saving.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread finishes a save while the trainer reads the finished saves."""
    made = saving.Saved

    def slow(*fields: object) -> saving.Saved:
        checkpoints.take_finished()
        return made(*fields)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "Saved", slow)
    checkpoints.save(1)
    checkpoints.wait()
    assert [saved.step for saved in checkpoints.take_finished()] == [1]
    assert not checkpoints.take_finished()


def test_a_rank_may_write_its_files_for_hours(checkpoints: saving.Checkpoints) -> None:
    """The other ranks wait for it in collectives of this group; torch's default is 30 minutes."""
    backend = checkpoints._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout >= timedelta(hours=12)


def test_a_dtensor_whose_shard_is_part_of_a_buffer_is_copied(group: None) -> None:
    """The shards of gradient-compression residuals are views into one buffer."""
    mesh = init_device_mesh("cpu", (1,))
    buffer = torch.arange(8.0)
    residual = DTensor.from_local(buffer[2:6], mesh, [Shard(0)])
    copied = HostCopy(torch.device("cpu"))
    for _ in range(2):
        copy = copied({"residual": residual})["residual"]
        assert isinstance(copy, DTensor) and copy.to_local().tolist() == buffer[2:6].tolist()
        buffer += 1


class OtherDevice:
    """Rank 3 of a job of four ranks (fsdp 2 x tp 2) whose meshes are of another device than the CPU. `tensor` has the
    rank's shard in CPU memory, in the place of that device's memory; the mesh is of the device `meta`, so anything that
    is copied to the mesh's device loses its values."""

    ROWS, COLUMNS = 7, 4  # over fsdp, rank 3 has the rows 4 to 6; over tp, the columns 2 and 3

    def __init__(self) -> None:
        mesh = init_device_mesh("meta", (2, 2), mesh_dim_names=("fsdp", "tp"))
        self.whole = torch.arange(1.0, 1 + self.ROWS * self.COLUMNS).view(self.ROWS, self.COLUMNS)
        part = self.whole[4:, 2:].clone()
        shape, stride = self.whole.shape, self.whole.stride()
        spec: Any = DTensor.from_local(
            part.to("meta"), mesh, [Shard(0), Shard(1)], run_check=False, shape=shape, stride=stride
        )
        self.tensor: Any = DTensor(part, spec._spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


@pytest.fixture
def other_device() -> Iterator[OtherDevice]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield OtherDevice()
    dist.destroy_process_group()


def test_the_copy_of_a_gpus_state_stays_on_the_host(other_device: OtherDevice) -> None:
    """On a GPU, a copy on the GPU would take the memory of the weights and the optimizer state once more, until they
    are written."""
    tensor = other_device.tensor
    copy = HostCopy(torch.device("cpu"))
    for _ in range(2):
        copies = copy({"model.weight": tensor, "optimizer.step": torch.tensor(5.0)})
        for one in copies.values():
            assert one.device.type == local_shard(one).device.type == "cpu"
        sharded: Any = copies["model.weight"]
        assert sharded.device_mesh.device_type == "cpu" != tensor.device_mesh.device_type
        assert sharded.to_local().equal(tensor.to_local())
        # the planner of torch.distributed.checkpoint places it as it places the original
        assert sharded.__create_chunk_list__() == tensor.__create_chunk_list__()
        (item,) = sharded.__create_write_items__("model.weight", sharded)
        (original,) = tensor.__create_write_items__("model.weight", tensor)
        assert item.tensor_data.chunk == original.tensor_data.chunk
        assert item.tensor_data.chunk.offsets == torch.Size([4, 2]) and item.tensor_data.size == (7, 4)
        tensor.to_local().add_(1.0)


def test_the_writer_gets_tensors_of_the_host(other_device: OtherDevice, tmp_path: Path) -> None:
    copies = HostCopy(torch.device("cpu"))({"model.weight": other_device.tensor})
    planner, writer = DefaultSavePlanner(), Writer(tmp_path, 3)
    planner.set_up_planner(copies, is_coordinator=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    writer.write_data(planner.finish_plan(plan), planner).wait()
    found = torch.frombuffer(bytearray((tmp_path / "rank-3.bin").read_bytes()), dtype=torch.float32)
    assert found.tolist() == other_device.whole[4:, 2:].flatten().tolist()


def test_a_rank_that_waits_for_a_save_reports_repeatedly(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rank did not report, the parent would consider a stopping run stuck and kill it."""
    enough = threading.Event()
    operations: list[str] = []

    class RecordingMeter(Meter):
        def set_operation(self, text: str) -> None:
            super().set_operation(text)
            if text.startswith("waiting for the checkpoint"):
                operations.append(text)
            if len(set(operations)) == 2:
                enough.set()

    checkpoints = Trainer(
        LAYOUT, RecordingMeter(2, 8), checkpoints_dir=tmp_path / "checkpoints"
    ).saving.checkpoints
    assert checkpoints
    monkeypatch.setattr(saving, "REPORT_EVERY_S", 0.06)
    monkeypatch.setattr(checkpoints, "write", lambda _, __: {"": enough.wait(10)})
    checkpoints.save(1)
    checkpoints.wait()
    assert enough.is_set() and operations[0].startswith("waiting for the checkpoint, 0.")


def test_written_files_have_their_checksums(tmp_path: Path, group: None) -> None:
    checkpoints = Trainer(LAYOUT, checkpoints_dir=tmp_path).saving.checkpoints
    assert checkpoints
    checkpoints.save(1)
    checkpoints.wait()
    manifest = read(tmp_path / "step-1").manifest
    assert manifest.sums.keys() == manifest.files.keys() == {"tensors.json", "rank-0.bin"}
    assert damage(tmp_path / "step-1") is None
    with (tmp_path / "step-1/rank-0.bin").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert "rank-0.bin has changed since it was written" in (damage(tmp_path / "step-1") or "")


class Operator(Agent):
    """An agent that proposes one change after another and collects the acks."""

    def __init__(self, *asked: Changes) -> None:
        super().__init__(None, lambda: (0, "", 0.0))
        self._pending = [Command(n, f"{n}", changes) for n, changes in enumerate(asked, 1)]
        self.acks: list[Ack] = []

    @property
    def pending(self) -> Command | None:
        return self._pending[0] if self._pending else None

    def settle(self, ack: Ack) -> None:
        self.acks.append(ack)
        self._pending = [command for command in self._pending if command.revision != ack.revision]

    @property
    def states(self) -> list[tuple[int, str]]:
        return [(ack.revision, ack.state) for ack in self.acks]


def test_a_save_is_applied_when_it_is_on_disk(tmp_path: Path, group: None) -> None:
    operator = Operator({"save": True})
    trainer = Trainer(LAYOUT, agent=operator, checkpoints_dir=tmp_path / "a")
    checkpoints_dir, written = trainer.saving.checkpoints, threading.Event()
    assert checkpoints_dir
    write = checkpoints_dir.write

    def slow(tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
        written.wait(10)
        return write(tensors, partial)

    checkpoints_dir.write = slow  # type: ignore[method-assign]
    trainer.train_step(0)
    trainer.train_step(1)
    assert operator.states == [(1, "agreed")], "two steps later it is still being written"
    assert operator.acks[0].why == "the checkpoint of step 1 is being written"
    written.set()
    checkpoints_dir.wait()
    trainer.saving.report()
    assert operator.states == [(1, "agreed"), (1, "applied")] and not operator.acks[1].why
    assert read(tmp_path / "a/step-1")


@pytest.mark.parametrize(
    ("asked", "state"), [({"save": True}, "rejected"), ({"save": True, "lr_scale": 0.5}, "applied")]
)
def test_a_save_that_fails_is_not_applied(tmp_path: Path, group: None, asked: Changes, state: str) -> None:
    """Saving fails because a file has the name of the checkpoint's folder. A knob change in the same proposal is still
    applied."""
    operator = Operator(asked)
    trainer = Trainer(LAYOUT, agent=operator, checkpoints_dir=tmp_path)
    (tmp_path / f"step-1{PARTIAL}").write_text("")
    trainer.run()
    assert operator.states == [(1, "agreed"), (1, state)]
    assert (
        "the checkpoint of step 1 was not saved" in operator.acks[1].why
        and "File exists" in operator.acks[1].why
    )
    assert trainer.board.values["lr_scale"] == asked.get("lr_scale", 1.0)


def test_a_paused_run_saves_once_and_again_only_after_a_failure(tmp_path: Path, group: None) -> None:
    operator = Operator(
        {"pause": True, "save": True}, {"save": True}, {"save": True}, {"save": True}, {"stop": True}
    )
    trainer = Trainer(LAYOUT, agent=operator, checkpoints_dir=tmp_path)
    checkpoints_dir, tries = trainer.saving.checkpoints, 0
    assert checkpoints_dir
    write = checkpoints_dir.write

    def at_the_second_try(tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(28, "No space left on device")
        return write(tensors, partial)

    checkpoints_dir.write = at_the_second_try  # type: ignore[method-assign]
    trainer.run()
    assert tries == 2
    final = {ack.revision: ack for ack in operator.acks}
    assert [final[n].state for n in range(1, 6)] == ["applied"] * 5
    assert not any(final[n].why for n in range(2, 6)) and read(tmp_path / "step-1")


def test_a_trainer_without_a_checkpoints_folder_trains(tmp_path: Path, group: None) -> None:
    first = Trainer(LAYOUT, checkpoints_dir=tmp_path / "checkpoints")
    assert first.saving.checkpoints
    first.train_step(0)
    first.saving.checkpoints.save(1)
    first.saving.checkpoints.wait()
    second = Trainer(LAYOUT, resume=tmp_path / "checkpoints/step-1")
    assert second.first_step == 1 and second.saving.checkpoints is None
    ours, theirs = (list(trainer.stages[0].parameters()) for trainer in (second, first))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_saves_use_the_same_buffers_and_training_does_not_change_them(
    checkpoints: saving.Checkpoints,
) -> None:
    tensors = {"a": torch.arange(6.0), "step": torch.tensor(3.0)}
    tensors |= {f"b.{n}": row for n, row in enumerate(torch.ones(2, 4))}
    first = checkpoints._copy(tensors)
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors.items())
    for tensor in tensors.values():
        tensor.add_(1)
    assert first["a"].tolist() == [0, 1, 2, 3, 4, 5] and float(first["step"]) == 3
    at = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = checkpoints._copy({name: tensor.detach() for name, tensor in tensors.items()})
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == at
    assert all(torch.equal(second[name], tensor) for name, tensor in tensors.items())


def test_a_periodic_save_is_skipped_while_another_is_written(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The skipped save is reported; the last save of a run waits for the running save instead."""
    layout = load(DEMO, [*SMALL, "train.steps=4", "checkpoint.every=1", "checkpoint.while_saving=skip"])
    goes_on = threading.Event()
    results: list[saving.Saved] = []
    with Trainer(layout, checkpoints_dir=tmp_path / "c", on_checkpoint=results.append) as trainer:
        checkpoints = trainer.saving.checkpoints
        assert checkpoints
        write = checkpoints.write

        def slow(*arguments: Any) -> dict[str, int]:
            assert goes_on.wait(60)
            return write(*arguments)

        monkeypatch.setattr(checkpoints, "write", slow)
        for done in (1, 2, 3):
            if checkpoints.due(done, last=False):
                checkpoints.save(done)
        assert not list((tmp_path / "c").glob("step-?"))
        goes_on.set()
        assert checkpoints.due(4, last=True)
        checkpoints.save(4)
        checkpoints.wait()
        trainer.saving.report()
    assert {saved.step: saved.why for saved in results} == {
        1: "", 2: "the previous one is still being written", 3: "the previous one is still being written", 4: ""
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "c").glob("step-?")) == ["step-1", "step-4"]
