"""Finding complete checkpoints and choosing the one to resume from. The tests write the folders themselves and need no
torch."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.protocol import Value
from agents.rundir.run_folder import make_folder
from agents.rundir.runs import RunError
from engine.checkpoint.folder_lock import LOCK, lock_folder
from engine.checkpoint.manifest import MANIFEST, OLD, PARTIAL, IncompleteError, Manifest, folder_name
from engine.checkpoint.reading import complete_checkpoints, read
from engine.checkpoint.resume_point import (
    Start,
    find_start,
    folder_of_job,
    is_restart,
    number_of_job,
    start_time,
    with_knob_values,
)
from engine.checkpoint.tensor_index import INDEX
from engine.checkpoint.writing import prune, remove_partial, seal
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import load
from tests.unit.engine.config.test_layout import DEMO

LAYOUT = load(DEMO)
TEXT, OTHER = (f"blake2b-{n:016x}" for n in (1, 2))


def save(
    checkpoints_dir: Path, step: int, layout: Layout = LAYOUT, knobs: dict[str, Value] | None = None
) -> Path:
    partial = checkpoints_dir / (folder_name(step) + PARTIAL)
    partial.mkdir(parents=True)
    (partial / "rank-0.bin").write_bytes(b"weights")
    (partial / INDEX).write_bytes(b"{}")
    manifest = Manifest(
        step=step, run="demo", layout=layout, data=TEXT, knobs=knobs or {}, revision=3, history=[], torch="2"
    )
    return seal(partial, manifest).folder


def steps(checkpoints_dir: Path) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in complete_checkpoints(checkpoints_dir)]


def test_a_completed_checkpoint_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, knobs={"capacity_factor": None, "micro_batches": 8})
    manifest = read(folder).manifest
    assert (manifest.step, manifest.layout, manifest.revision) == (5, LAYOUT, 3)
    assert manifest.files == {"rank-0.bin": 7, INDEX: 2}
    assert manifest.sums == {"rank-0.bin": zlib.crc32(b"weights"), INDEX: zlib.crc32(b"{}")}
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json: No such file"),
        (
            lambda folder: (folder / MANIFEST).write_text('{"format": 1, "step'),
            "manifest.json cannot be read",
        ),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\x00"), "manifest.json cannot be read"),
        (
            lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
            "has format 1, and this engine",
        ),
        (lambda folder: (folder / "rank-0.bin").write_bytes(b"weig"), "rank-0.bin has 4 of 7 bytes"),
        (lambda folder: (folder / "rank-0.bin").unlink(), "rank-0.bin has 0 of 7 bytes"),
    ],
)
def test_an_incomplete_checkpoint_is_not_chosen(tmp_path: Path, spoil, why: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints_dir = tmp_path / "run/checkpoints"
    save(checkpoints_dir, 3)
    torn = save(checkpoints_dir, 6)
    spoil(torn)
    messages: list[str] = []
    start = find_start(LAYOUT, True, tmp_path / "run", tmp_path / "new", False, warn=messages.append)
    assert start.checkpoint and start.checkpoint.manifest.step == 3
    assert len(messages) == 1 and why in messages[0]
    with pytest.raises(LayoutError, match="there is nothing to resume: ") as refused:
        find_start(LAYOUT, torn, None, tmp_path / "new", False)
    assert why in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(IncompleteError):
        read(torn)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "byte"), [("rank-0.bin", b"w"), (MANIFEST, b"6")])
@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_with_a_flipped_bit_is_not_chosen(
    tmp_path: Path, name: str, byte: bytes, again: bool
) -> None:
    """The file has the right size and is well-formed, so only the checksum detects the damage."""
    checkpoints_dir = tmp_path / "run/checkpoints"
    save(checkpoints_dir, 3)
    spoilt = save(checkpoints_dir, 6)
    flip(spoilt / name, (spoilt / name).read_bytes().index(byte))
    messages: list[str] = []
    start = find_start(LAYOUT, True, tmp_path / "run", tmp_path / "new", again, warn=messages.append)
    assert start.checkpoint and start.checkpoint.manifest.step == 3
    why = f"{spoilt} is damaged: {name} has changed since it was written"
    assert messages == [f"skipped a checkpoint: {why}"]
    for path in (tmp_path / "run", checkpoints_dir):
        begun = find_start(LAYOUT, path, None, tmp_path / "new", False)
        assert begun.checkpoint and begun.checkpoint.manifest.step == 3
    with pytest.raises(LayoutError) as refused:
        find_start(LAYOUT, spoilt, None, tmp_path / "new", False)
    assert str(refused.value) == f"there is nothing to resume: {why}"
    flip(checkpoints_dir / "step-3/rank-0.bin", 0)
    with pytest.raises(LayoutError, match="nothing to resume: no complete checkpoint in"):
        find_start(LAYOUT, True, tmp_path / "run", tmp_path / "new", again)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step)
    (tmp_path / "step-4" / MANIFEST).unlink()
    (tmp_path / "mine").mkdir()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-6", "step-8"]


def test_a_checkpoint_of_another_format_is_not_removed(tmp_path: Path) -> None:
    """A run that would overwrite a checkpoint of another format is refused."""
    other = save(tmp_path / "run/checkpoints", 1)
    (other / MANIFEST).write_text('{"format": 1}')
    with pytest.raises(
        LayoutError, match="step-1 has the format of another engine version; choose another folder"
    ):
        find(tmp_path, run_dir=tmp_path / "run", resume=False)
    for step in (2, 4, 6):
        save(other.parent, step)
    prune(other.parent, 1)
    assert sorted(path.name for path in other.parent.iterdir()) == ["step-1", "step-6"]


def test_a_step_saved_again_replaces_the_old_checkpoint_and_is_the_newest(tmp_path: Path) -> None:
    """A run that resumes from step 2 replaces the later checkpoints of the earlier run."""
    for step in (2, 4, 6):
        save(tmp_path, step)
    again = save(tmp_path, 4, with_knob_values(LAYOUT, {"lr_scale": 2.0}))
    assert steps(tmp_path) == [2, 6, 4]
    assert read(again).manifest.layout.knobs.lr_scale == 2.0
    prune(tmp_path, 1)
    assert steps(tmp_path) == [4]


class Killed(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("leftover", [False, True], ids=["", "after a killed save"])
def test_a_save_that_is_killed_anywhere_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: bool
) -> None:
    """A resumed run saves step 4 again and is killed before each operation on the file system in turn. The next process
    finds the checkpoint of step 4, old or new, and saves it again."""
    for kill_at in range(200):
        folder = tmp_path / f"{leftover}-{kill_at}"
        save(folder, 2)
        save(folder, 4)
        if leftover:
            shutil.copytree(folder / "step-4", folder / f"step-4{OLD}")
        with monkeypatch.context() as patch:
            count = itertools.count()
            for name in ("rename", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, dying(getattr(os, name), count, kill_at))
            try:
                save(folder, 4, with_knob_values(LAYOUT, {"lr_scale": 2.0}))
                prune(folder, 2)
                killed = False
            except Killed:
                killed = True
        remove_partial(folder)  # by the next process
        assert {*steps(folder)} == {2, 4}, kill_at
        save(folder, 4)
        prune(folder, 1)
        assert [path.name for path in folder.iterdir()] == ["step-4"], kill_at
        if not killed:
            assert kill_at > 6
            return


def dying(operation: Callable[..., object], count: Iterator[int], kill_at: int) -> Callable[..., object]:
    def run(*arguments: object, **named: object) -> object:
        if next(count) == kill_at:
            raise Killed
        return operation(*arguments, **named)

    return run


def test_partial_folders_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / f"step-4{PARTIAL}").mkdir()
    (tmp_path / f"step-2.old{PARTIAL}").mkdir()
    assert steps(tmp_path) == [2]
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    remove_partial(tmp_path / "nowhere")


def find(tmp_path: Path, layout: Layout = LAYOUT, resume: bool | Path = True, **options: object) -> Start:
    named = Path(layout.run.dir) / "demo-20260101-000000"
    return find_start(layout, resume, options.pop("run_dir", None), named, **({"restarted": False} | options))  # type: ignore[arg-type]


def test_resume_continues_the_newest_run_of_the_name(tmp_path: Path) -> None:
    layout = load(DEMO, [f"run.dir={tmp_path}"])
    with pytest.raises(
        LayoutError, match=r"nothing to resume: no complete checkpoint in the folders .*/demo-\*"
    ):
        find(tmp_path, layout)
    for run in ("demo-20250101-000000", "demo-20250102-000000", "demo-big-20250103-000000"):
        save(tmp_path / run / "checkpoints", 2)
    (tmp_path / "demo-20250104-000000").mkdir()
    start = find(tmp_path, layout)
    assert start.run_dir == tmp_path / "demo-20250102-000000"


def test_resume_with_a_path_starts_a_new_run(tmp_path: Path) -> None:
    layout = load(DEMO, [f"run.dir={tmp_path}"])
    first = save(tmp_path / "a/checkpoints", 2)
    newest = save(tmp_path / "a/checkpoints", 4)
    for path, chosen in ((tmp_path / "a", newest), (tmp_path / "a/checkpoints", newest), (first, first)):
        start = find(tmp_path, layout, path)
        assert start.run_dir is None and start.checkpoint and start.checkpoint.folder == chosen
    with pytest.raises(LayoutError, match="is not a folder"):
        find(tmp_path, layout, tmp_path / "b")


def test_a_new_run_in_a_folder_with_checkpoints_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a/checkpoints", 2)
    with pytest.raises(
        LayoutError, match="already has checkpoints up to step-2; continue from there with --resume"
    ):
        find(tmp_path, resume=False, run_dir=tmp_path / "a")


def test_resume_from_elsewhere_into_a_folder_with_checkpoints_is_refused(tmp_path: Path) -> None:
    """If such a resume were allowed, the run would prune the checkpoints that are already in its folder."""
    for run in ("a", "b"):
        save(tmp_path / run / "checkpoints", 2)
    with pytest.raises(
        LayoutError, match="b already has checkpoints up to step-2; continue from there with --resume"
    ):
        find(tmp_path, resume=tmp_path / "a", run_dir=tmp_path / "b")


def test_a_checkpoint_of_the_last_step_is_refused(tmp_path: Path) -> None:
    layout = load(DEMO, ["train.steps=4"])
    save(tmp_path / "a/checkpoints", 4)
    with pytest.raises(
        LayoutError,
        match=r"step-4 is of step 4, but train.steps = 4 leaves nothing to "
        r"train; legal: a larger train.steps",
    ):
        find(tmp_path, layout, tmp_path / "a")


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    (save(tmp_path / "a/checkpoints", 2) / MANIFEST).unlink()
    messages: list[str] = []
    with pytest.raises(LayoutError) as refused:
        find(tmp_path, resume=tmp_path / "a", warn=messages.append)
    assert str(refused.value) == f"there is nothing to resume: no complete checkpoint in {tmp_path / 'a'}"
    assert "step-2 is not a complete checkpoint: manifest.json: No such file" in messages[0]


HOLDER = """
import sys, time, pathlib, engine.checkpoint.folder_lock as s
with s.lock_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_locked_by_one_run(tmp_path: Path) -> None:
    """If the run is killed, the lock is released."""
    checkpoints_dir = tmp_path / "a/checkpoints"
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(checkpoints_dir)], stdout=subprocess.PIPE)
    try:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"checkpoints is in use by process {other.pid} on ") as refused:
            lock_folder(checkpoints_dir, wait_s=0.1).__enter__()
        assert "\n" not in str(refused.value)
        other.send_signal(signal.SIGKILL)
        with lock_folder(checkpoints_dir):
            assert (checkpoints_dir / LOCK).read_text().startswith(f"process {os.getpid()} on ")
        with lock_folder(checkpoints_dir, wait_s=0.0):
            pass
    finally:
        other.kill()
        other.wait()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    with pytest.raises(RunError, match=r"cannot save in .*/blocked/a: Not a directory"):
        lock_folder(tmp_path / "blocked/a").__enter__()


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    messages: list[str] = []
    with lock_folder(tmp_path, warn=messages.append):
        assert "has no locks (No locks available)" in messages[0]


def test_a_restart_by_torchrun(tmp_path: Path) -> None:
    """The run resumes from its own checkpoints or, if it has none, from the checkpoint that the command line names."""
    layout = load(DEMO, [f"run.dir={tmp_path}"])
    assert find(tmp_path, layout, resume=False, restarted=True) == Start(layout, None)
    assert find(tmp_path, layout, resume=True, restarted=True) == Start(layout, None)
    other = save(tmp_path / "other/checkpoints", 2)
    start = find(tmp_path, layout, resume=tmp_path / "other", restarted=True)
    assert start.checkpoint and start.checkpoint.folder == other
    own = save(tmp_path / "demo-20260101-000000/checkpoints", 4)
    start = find(tmp_path, layout, resume=tmp_path / "other", restarted=True)
    assert start.checkpoint and start.checkpoint.folder == own and start.run_dir == own.parents[1]
    start = find_start(layout, True, None, tmp_path / "demo-20260102-000000", restarted=True)
    assert start.checkpoint and start.checkpoint.folder == own  # a requeued job has a new name for its folder
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert not is_restart({"TORCHELASTIC_RESTART_COUNT": "0"}) and not is_restart({})


def test_a_run_is_named_after_the_start_of_torchrun() -> None:
    under = {"TORCHELASTIC_RUN_ID": "x"}
    assert start_time(under, os.getpid()) == start_time(under, os.getpid()) < start_time({}, os.getpid())


def test_two_jobs_of_torchrun_in_one_second_keep_their_folders(tmp_path: Path) -> None:
    """Both times that torchrun starts the ranks of a job, the job finds its own folder."""
    named = tmp_path / "demo-20260101-000000"
    jobs = [{"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port} for port in ("29500", "29501")]
    numbers = [number_of_job(job, os.getpid()) for job in jobs]
    assert len({*numbers, number_of_job(jobs[0], 1)}) == 3 and number_of_job({}, 1) is None
    first, second = (make_folder(None, folder_of_job(named, number, False)) for number in numbers)
    assert first == named and second.name == f"{named.name}-{numbers[1]}"
    assert [folder_of_job(named, number, True) for number in numbers] == [first, second]


def test_of_the_runs_of_one_second_the_last_is_the_newest(tmp_path: Path) -> None:
    layout = load(DEMO, [f"run.dir={tmp_path}"])
    for number in ("", "-2", "-10"):
        save(tmp_path / f"demo-20250101-000000{number}" / "checkpoints", 2)
    assert find(tmp_path, layout).run_dir == tmp_path / "demo-20250101-000000-10"


def test_changed_knobs_keep_their_values(tmp_path: Path) -> None:
    knobs: dict[str, Value] = {"micro_batches": 8, "lr_scale": 1.0, "recompute": "full", "grad_clip": None}
    save(tmp_path / "a/checkpoints", 2, knobs=knobs)
    layout = load(DEMO, ["knobs.lr_scale=0.5", "knobs.recompute=selective"])
    start = find(tmp_path, layout, tmp_path / "a", fixed=["knobs.recompute"])
    assert start.layout.knobs.micro_batches == 8  # set by an operator
    assert start.layout.train.grad_clip is None  # set by an operator; a knob whose key is not in [knobs]
    assert start.layout.knobs.lr_scale == 0.5  # no operator changed it, so the layout's value is used
    assert start.layout.knobs.recompute == "selective"  # set on the command line


def test_repeating_the_command_undoes_no_change(tmp_path: Path) -> None:
    """If the command repeats the knob value with which the run was started, an operator's later change is kept; a
    different value in the command takes effect."""
    layout = load(DEMO, ["knobs.micro_batches=2"])
    again = {"run_dir": tmp_path / "a", "fixed": ["knobs.micro_batches"]}
    save(tmp_path / "a/checkpoints", 2, layout, {"micro_batches": 8})
    assert find(tmp_path, layout, **again).layout.knobs.micro_batches == 8
    assert (
        find(tmp_path, layout, resume=tmp_path / "a", restarted=True, **again).layout.knobs.micro_batches == 8
    )
    other = load(DEMO, ["knobs.micro_batches=16"])
    assert find(tmp_path, other, **again).layout.knobs.micro_batches == 16


def test_the_command_line_of_a_new_run_takes_precedence(tmp_path: Path) -> None:
    layout = load(DEMO, ["knobs.micro_batches=2"])
    save(tmp_path / "a/checkpoints", 2, layout, {"micro_batches": 8})
    start = find(tmp_path, layout, tmp_path / "a", fixed=["knobs.micro_batches"])
    assert start.layout.knobs.micro_batches == 2
    assert find(tmp_path, layout, tmp_path / "a").layout.knobs.micro_batches == 8


def test_an_illegal_knob_value_is_replaced_by_the_layouts(tmp_path: Path) -> None:
    knobs: dict[str, Value] = {"micro_batches": 2, "recompute": "full", "schedule": "interleaved_zb"}
    begun = load(DEMO, ["schedule.name=interleaved", "model.layers=8"])
    save(tmp_path / "a/checkpoints", 2, begun, knobs=knobs)
    messages: list[str] = []
    layout = load(DEMO, ["grid.pp=1", "model.layers=8"])
    start = find(tmp_path, layout, tmp_path / "a", warn=messages.append)
    assert start.layout.schedule.name == "1f1b" and start.layout.knobs.recompute == "full"
    assert start.layout.knobs.micro_batches == 2
    assert (
        len(messages) == 1 and "schedule.name = interleaved_zb, the run continues with 1f1b: " in messages[0]
    )
    assert "\n" not in messages[0]
    layout = load(DEMO, ["grid.pp=4", "model.layers=8"])
    start = find(tmp_path, layout, tmp_path / "a", warn=messages.append)
    assert any("knobs.micro_batches" in line and "legal: 4, 8, 16" in line for line in messages[1:])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layers=6", "has model.layers = 4, the layout has 6"),
        ("model.kv_heads=none", "has model.kv_heads = 2, the layout has none"),
        ("run.seed=2", "has run.seed = 1, the layout has 2"),
        ("train.optimizer=sgd", "has train.optimizer = adamw, the layout has sgd"),
    ],
)
def test_another_model_or_data_is_refused(tmp_path: Path, override: str, message: str) -> None:
    save(tmp_path / "a/checkpoints", 2)
    with pytest.raises(LayoutError) as refused:
        find(tmp_path, load(DEMO, [override]), tmp_path / "a")
    assert message in str(refused.value)


def test_another_text_is_refused_unless_the_layout_has_its_digest(tmp_path: Path) -> None:
    folder = save(tmp_path / "a/checkpoints", 2)
    elsewhere = load(DEMO, ["data.source=text:/moved/**"])
    assert find(tmp_path, elsewhere, tmp_path / "a", data=TEXT).checkpoint, "the same text in another folder"
    for resume, run_dir in ((tmp_path / "a", None), (True, tmp_path / "a")):
        with pytest.raises(LayoutError) as refused:
            find(tmp_path, LAYOUT, resume, run_dir=run_dir, data=OTHER)
        assert str(refused.value) == (
            f"{folder} was trained on another text: its digest is {TEXT}, but the digest of data.source = 'stdlib' on "
            f"this machine is {OTHER} (other files, or for stdlib another release of Python); legal: the text of the "
            f"checkpoint, or data.digest={OTHER} to continue with this one"
        )
    messages: list[str] = []
    meant = load(DEMO, [f"data.digest={OTHER}"])
    assert find(tmp_path, meant, tmp_path / "a", data=OTHER, warn=messages.append).checkpoint
    assert len(messages) == 1 and f"continues with data.digest = {OTHER}" in messages[0]


def test_checkpoints_in_another_folder(tmp_path: Path) -> None:
    layout = load(DEMO, [f"run.dir={tmp_path}/runs", f"checkpoint.dir={tmp_path}/checkpoints"])
    save(tmp_path / "checkpoints/demo-20250101-000000", 2)
    (tmp_path / "runs/demo-20250101-000000").mkdir(parents=True)
    start = find(tmp_path, layout)
    assert start.checkpoint and start.run_dir == tmp_path / "runs/demo-20250101-000000"
