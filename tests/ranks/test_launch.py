"""Ranks come to life, are watched, and end: small drivers as real processes, hurt in every way we know."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.failure import Outcome, report_of, root_cause, sentence
from engine.keeper import RESTARTS_A_MINUTE, HubKeeper
from engine.launch import joined_place
from engine.place import Where, alone

ROOT = Path(__file__).parents[2]

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from engine.launch import Patience, join, joined_place, launch

HERE = Path(__file__).parent
RUN = HERE / "run"

def note(place, name, text=""):
    "A file for the test to see, whole or not at all."
    unfinished = HERE / f".{name}.{place.rank}"
    unfinished.write_text(str(text))
    unfinished.rename(HERE / f"{name}.{place.rank}")

def meet(place):
    import torch.distributed as dist
    dist.init_process_group("gloo", store=place.store(), rank=place.rank, world_size=place.world)
    return dist

def steps(place, until=lambda: False):
    "A trainer without a model: steps until it is asked to stop."
    note(place, "pid", os.getpid())
    step = 0
    while not place.stop_requested() and not until():
        place.at(step, "tp all-gather, layer 2")
        time.sleep(0.02)
        step += 1
    note(place, "finished", step)
"""

LAUNCH = """
if __name__ == "__main__":
    sys.exit(launch({world}, work, name_of_rank=lambda rank: f"dp{{rank}}", hub={hub!r}, run="a-run",
                    run_dir=RUN, preload={preload!r}, patience=Patience(**{patience!r})))
"""

JOIN = """
if __name__ == "__main__":
    place = joined_place(RUN)
    sys.exit(join(place, work, name_of_rank=lambda rank: f"dp{{rank}}", hub={hub!r}, run="a-run",
                  on_failure=lambda: print("last word")))
"""

TORCH = ("torch", "torch.distributed")


def eventually(what: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Driver:
    """A driver script in its own folder, and what it left there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir = folder / "run"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        work: str,
        world: int = 2,
        *,
        hub: str = "none",
        preload: tuple[str, ...] = (),
        patience: dict[str, float] | None = None,
        tail: str = LAUNCH,
        python: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        script = self.folder / "driver.py"
        tail = tail.format(world=world, hub=hub, preload=preload, patience=patience or {})
        script.write_text(HEAD + textwrap.dedent(work) + tail)
        path = os.pathsep.join([str(ROOT), str(self.folder), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, *python, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path} | (environ or {}),
        )
        self.started.append(process)
        return process

    def notes(self, name: str) -> dict[int, str]:
        return {int(file.suffix[1:]): file.read_text() for file in self.folder.glob(f"{name}.*")}

    def pids(self, world: int) -> list[int]:
        """The ranks' processes, once all of them are at work."""
        eventually(lambda: len(self.notes("pid")) == world)
        return [int(pid) for _, pid in sorted(self.notes("pid").items())]

    def end(self, process: subprocess.Popen[str], seconds: float = 20.0) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=seconds)
        left = [rank for rank, pid in self.notes("pid").items() if not gone(int(pid))]
        assert not left, f"ranks {left} outlived their run"
        return process.returncode, out, err

    def clean(self) -> None:
        for pid in [int(pid) for pid in self.notes("pid").values()]:
            try:
                if "driver.py" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.clean()


# ---------------------------------------------------------------------------------------------- ends as asked


def test_ranks_meet_work_and_end(driver: Driver) -> None:
    run = driver.start(
        """
        sys.stdout.write("before;")  # in the parent's buffer at the fork
        def work(place):
            dist = meet(place)
            import torch
            total = torch.ones(1)
            dist.all_reduce(total)
            if place.rank == 0:
                print(int(total), torch.get_num_threads() >= 1)
            dist.destroy_process_group()
            if place.rank:
                time.sleep(0.3)  # rank 0 serves the store and must have stayed
                place.store().add("late", 1)
        """,
        world=3,
        preload=TORCH,
    )
    assert driver.end(run) == (0, "before;3 True\n", "")


def test_sigterm_lets_every_rank_finish_its_step(driver: Driver) -> None:
    run = driver.start("def work(place): steps(place)")
    driver.pids(2)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")
    assert set(driver.notes("finished")) == {0, 1}


def test_sigterm_to_one_rank_is_that_ranks_flag_only(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            steps(place, until=lambda: place.rank == 0 and (HERE / "over").exists())
            note(place, "asked", place.stop_requested())
        """
    )
    os.kill(driver.pids(2)[1], signal.SIGTERM)
    eventually(lambda: 1 in driver.notes("asked"))
    assert run.poll() is None
    (driver.folder / "over").touch()
    assert driver.end(run) == (0, "", "")
    assert driver.notes("asked") == {0: "False", 1: "True"}


def test_ctrl_c_ends_in_order_with_130(driver: Driver) -> None:
    run = driver.start("def work(place): steps(place)")
    driver.pids(2)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: parent and ranks alike
    assert driver.end(run) == (130, "", "")
    assert set(driver.notes("finished")) == {0, 1}


def test_a_second_ctrl_c_kills_at_once(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            while not place.stop_requested():
                time.sleep(0.01)
            note(place, "stubborn")
            time.sleep(60)
        """
    )
    driver.pids(2)
    run.send_signal(signal.SIGINT)
    eventually(lambda: len(driver.notes("stubborn")) == 2)
    run.send_signal(signal.SIGINT)
    assert driver.end(run, 1.5) == (130, "", "")


def test_a_stop_while_torch_is_imported(driver: Driver) -> None:
    (driver.folder / "slow_import.py").write_text(
        f"import pathlib, time\npathlib.Path({str(driver.folder)!r}, 'importing').touch()\ntime.sleep(60)"
    )
    run = driver.start("def work(place): steps(place)", preload=("slow_import",))
    eventually((driver.folder / "importing").exists)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run, 5) == (0, "", "")
    assert not driver.notes("pid")


def test_a_suspended_rank_hears_the_stop(driver: Driver) -> None:
    run = driver.start("def work(place): steps(place)")
    os.kill(driver.pids(2)[1], signal.SIGSTOP)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")


def test_a_reader_that_leaves_ends_the_run(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            step = 0
            while not (place.stop_requested() if place.rank == 0 else (HERE / "over").exists()):
                if place.rank == 0:
                    print(json.dumps({"step": step}))
                step += 1
                time.sleep(0.01)
            (HERE / "over").touch()
        """
    )
    assert run.stdout
    assert json.loads(run.stdout.readline()) == {"step": 0}
    run.stdout.close()
    assert run.stderr
    assert run.stderr.read() == ""
    assert run.wait(10) == 0


# -------------------------------------------------------------------------------------------------- failures


def test_an_error_in_one_rank_among_many_in_a_collective(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            dist = meet(place)
            import torch
            note(place, "pid", os.getpid())
            for step in range(100):
                place.at(step, "tp all-gather, layer 2")
                if place.rank == 1 and step == 3:
                    raise ValueError("an odd number of heads\\nand more")
                dist.all_reduce(torch.ones(1))
        """,
        world=3,
        preload=TORCH,
    )
    status, out, err = driver.end(run)
    first, *rest = err.splitlines()
    assert (
        first == "rank 1 (dp1) failed at step 3 in tp all-gather, layer 2: ValueError: an odd number of heads"
    )
    assert rest[0] == "Traceback (most recent call last):" and rest.count(rest[0]) == 1
    reports = driver.run_dir / "failure.txt"
    assert rest[-1] == f"what every rank reported: {reports}"
    assert all(f"\nrank {rank} (dp{rank}) " in reports.read_text() for rank in range(3))
    assert (status, out) == (1, "")


def test_a_killed_rank_is_named_not_those_it_left_behind(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            dist = meet(place)
            import torch
            note(place, "pid", os.getpid())
            for step in range(10_000):
                place.at(step, "dp all-reduce")
                dist.all_reduce(torch.ones(1))
        """,
        world=3,
        preload=TORCH,
    )
    os.kill(driver.pids(3)[2], signal.SIGKILL)
    status, _, err = driver.end(run)
    assert status == 1
    assert err.startswith("rank 2 (dp2) was killed by SIGKILL at step ")
    assert err.splitlines()[0].endswith(" in dp all-reduce")
    assert "Traceback" not in err


def test_a_rank_that_dies_before_the_others_have_met(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            if place.rank == 0:
                raise MemoryError
            meet(place)
        """,
        preload=TORCH,
    )
    status, _, err = driver.end(run)
    assert (status, err.splitlines()[0]) == (1, "rank 0 (dp0) failed before its first step: MemoryError")


def test_a_rank_that_slips_away(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            if place.rank == 1:
                os._exit(0)
            steps(place)
        """
    )
    status, _, err = driver.end(run)
    assert status == 1
    assert err.startswith("rank 1 (dp1) exited with status 0 before its first step, its work unfinished\n")


def test_a_straggler_is_killed_named_and_asked_for_its_stack(driver: Driver) -> None:
    run = driver.start(
        """
        def hang_here():
            time.sleep(60)
        def work(place):
            note(place, "pid", os.getpid())
            place.at(7, "a snapshot")
            if place.rank == 1:
                hang_here()
        """,
        patience={"straggler_s": 0.3},
    )
    status, _, err = driver.end(run)
    assert status == 1
    assert err.startswith(
        "rank 1 (dp1) did not end within 0.3 s of the first rank and was killed at step 7 in a snapshot\n"
    )
    assert "in hang_here" in (driver.run_dir / "failure.txt").read_text()


def test_ranks_that_ignore_a_stop_and_stand_still(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            place.at(7, "ep all-to-all")
            time.sleep(60)
        """,
        patience={"stuck_s": 0.5},
    )
    driver.pids(2)
    run.send_signal(signal.SIGTERM)
    status, _, err = driver.end(run)
    assert status == 1
    assert (
        "did not stop when asked, no rank moved for 0.5 s, and was killed at step 7 in ep all-to-all" in err
    )


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own watch over parents is Linux's")


@pytest.mark.parametrize(
    "busy",
    [
        pytest.param("time.sleep(60)", id="at work"),
        pytest.param("place.rank and time.sleep(60)", id="serving the store"),
        pytest.param("ctypes.PyDLL(None).sleep(60)", id="in C, with the interpreter's lock", marks=LINUX),
        pytest.param("(ctypes.CDLL(None).prctl(1, 0), time.sleep(60))", id="without the kernel", marks=LINUX),
    ],
)
def test_no_process_outlives_a_killed_parent(driver: Driver, busy: str) -> None:
    run = driver.start(
        f"""
        def work(place):
            import ctypes
            note(place, "pid", os.getpid())
            {busy}
        """,
        hub="auto",
    )
    pids = driver.pids(2)
    eventually((driver.run_dir / "hub.json").exists)
    pids.append(json.loads((driver.run_dir / "hub.json").read_text())["pid"])
    run.kill()
    eventually(lambda: all(gone(pid) for pid in pids), 5)


def test_root_cause() -> None:
    def raised(rank: int, error: BaseException) -> Outcome:
        return Outcome(rank, status=1, report=report_of(rank, Where(4, "x"), error))

    peer = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
    own = ValueError("mine")
    teardown = RuntimeError("Connection closed by peer")
    teardown.__context__ = own
    wrapped = RuntimeError("step 4 failed")
    wrapped.__cause__ = peer
    followers = [raised(0, peer), raised(1, wrapped), Outcome(2, status=-signal.SIGABRT)]
    ended = [Outcome(4, status=0, done=True), Outcome(5, status=-signal.SIGKILL, ended_by_us=True)]

    assert root_cause([*followers, raised(3, own), *ended]).rank == 3
    assert root_cause([*followers, raised(3, teardown), *ended]).rank == 3
    assert "ValueError: mine" in sentence(raised(3, teardown), "")
    assert root_cause([*followers, Outcome(3, status=-signal.SIGSEGV), *ended]).rank == 3
    assert root_cause([*followers, raised(3, own), Outcome(6, status=-signal.SIGKILL)]).rank == 6
    assert root_cause(followers).rank == 2
    assert root_cause(followers[:2]).rank == 0


# ------------------------------------------------------------------------------------------------------- hub


def test_a_killed_hub_comes_back_at_the_same_place(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "hub", place.hub)
            steps(place)
        """,
        hub="auto",
    )
    pids = driver.pids(2)
    eventually((driver.run_dir / "hub.json").exists)
    first = json.loads((driver.run_dir / "hub.json").read_text())

    def now() -> dict[str, object]:
        return json.loads((driver.run_dir / "hub.json").read_text())  # type: ignore[no-any-return]

    os.kill(first["pid"], signal.SIGKILL)
    eventually(lambda: now()["pid"] != first["pid"])
    second = now()
    assert second["endpoints"] == first["endpoints"]
    assert set(driver.notes("hub").values()) == {first["endpoints"]["ranks"]}
    assert not any(gone(pid) for pid in pids)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")
    assert gone(int(str(second["pid"])))
    assert not Path(first["endpoints"]["ranks"].removeprefix("ipc://")).parent.exists()


def test_a_hub_that_cannot_live_is_let_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "hub.log"
    keeper = HubKeeper([sys.executable, "-S", "-c", "raise SystemExit('no room')"], log)
    keeper.start()
    end = time.monotonic() + 8
    while (keeper.seconds_to_restart() or 0) < 10 and time.monotonic() < end:
        keeper.tick()
        time.sleep(0.02)
    keeper.close()
    assert log.read_text().count("no room") == RESTARTS_A_MINUTE
    assert capsys.readouterr().err.count("the run goes on without it") == 1


# ---------------------------------------------------------------------------------------- torchrun and Slurm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_joined_to_torchrun_with_a_hub(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            dist = meet(place)
            note(place, "pid", os.getpid())
            note(place, "place", json.dumps([place.world, place.local_rank, place.local_world, place.hub]))
            while not place.stop_requested():
                time.sleep(0.02)
            dist.destroy_process_group()
            note(place, "finished")
        """,
        tail=JOIN,
        python=TORCHRUN,
        hub="auto",
    )
    eventually(lambda: len(driver.notes("place")) == 2, 30)
    eventually((driver.run_dir / "hub.json").exists)
    places = {rank: json.loads(text) for rank, text in driver.notes("place").items()}
    hub = json.loads((driver.run_dir / "hub.json").read_text())
    ranks = hub["endpoints"]["ranks"]
    assert places == {0: [2, 0, 2, ranks], 1: [2, 1, 2, ranks]}
    for pid in driver.pids(2):
        os.kill(pid, signal.SIGTERM)
    status, _, err = driver.end(run)
    assert (status, set(driver.notes("finished"))) == (0, {0, 1}), err
    assert "Traceback" not in err
    assert gone(hub["pid"])


def test_a_failure_under_torchrun(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            place.at(5, "pp receive")
            if place.rank == 1:
                raise ValueError("mine")
            steps(place)
        """,
        tail=JOIN,
        python=TORCHRUN,
    )
    status, out, err = driver.end(run, 40)
    assert (status, out) == (1, "last word\n")
    assert "\nrank 1 (dp1) failed at step 5 in pp receive: ValueError: mine\nTraceback" in f"\n{err}"


def test_no_rank_outlives_a_killed_torchrun(driver: Driver) -> None:
    run = driver.start(
        """
        def work(place):
            note(place, "pid", os.getpid())
            time.sleep(60)
        """,
        tail=JOIN,
        python=TORCHRUN,
    )
    eventually(lambda: len(driver.notes("pid")) == 2, 30)
    run.kill()
    eventually(lambda: all(gone(pid) for pid in driver.pids(2)), 3)


def test_joined_to_slurm(driver: Driver) -> None:
    work = """
        def work(place):
            import torch
            dist = meet(place)
            total = torch.ones(1)
            dist.all_reduce(total)
            note(place, "total", int(total))
            dist.destroy_process_group()
            if place.rank:
                time.sleep(1)
                place.store().add("late", 1)
        """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    runs = [
        driver.start(
            work, tail=JOIN, environ=_slurm(rank) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        for rank in range(2)
    ]
    assert [driver.end(run) for run in runs] == [(0, "", ""), (0, "", "")]
    assert driver.notes("total") == {0: "2", 1: "2"}


def _slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }


MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN_ENVIRON = MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN_ENVIRON, (5, 8, 1, 4)),
        (_slurm(1) | MASTER, (1, 2, 1, 2)),
        (
            _slurm(1)
            | MASTER
            | {"SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"},
            (1, 9, 1, 4),
        ),
        (_slurm(0) | {"SLURM_NTASKS": "1"}, None),  # a shell in a step of one task
        ({k: v for k, v in _slurm(0).items() if k != "SLURM_STEP_ID"}, None),  # a batch script, without srun
    ],
)
def test_place_in_an_environment(
    tmp_path: Path, environ: dict[str, str], expected: tuple[int, int, int, int] | None
) -> None:
    place = joined_place(tmp_path, environ)
    assert expected == (place and (place.rank, place.world, place.local_rank, place.local_world))


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (_slurm(1), "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN_ENVIRON | {"LOCAL_RANK": ""}, "LOCAL_RANK"),
        (TORCHRUN_ENVIRON | {"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many'"),
        (TORCHRUN_ENVIRON | {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000"),
        (TORCHRUN_ENVIRON | {"RANK": "8"}, "rank 8 of 8"),
        (_slurm(1) | MASTER | {"SLURM_NODEID": "3"}, "node 3"),
    ],
)
def test_half_an_environment_is_refused_in_a_sentence(
    tmp_path: Path, environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        joined_place(tmp_path, environ)
    assert named in str(refusal.value)


def test_where_a_rank_is(tmp_path: Path) -> None:
    place = alone(tmp_path)
    assert place.where() is None
    place.at(0, "é" * 200)
    assert place.where() == Where(0, "é" * 60)
    place.at(41, "tp all-gather, layer 2")
    assert place.where() == Where(41, "tp all-gather, layer 2")
