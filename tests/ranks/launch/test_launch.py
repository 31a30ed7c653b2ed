"""Starting, supervising and ending forked ranks: small test programs run as real processes, with signals and
failures."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agents.rundir.hub_supervisor import RESTARTS_A_MINUTE, HubSupervisor
from engine.launch.supervision.failure import Outcome, report_of, root_cause, sentence
from engine.rendezvous import LastOperation, single_rank_context
from tests.ranks.driver import TIMEOUT_S, TORCH, Driver, eventually, gone


def test_ranks_start_work_and_end(driver: Driver) -> None:
    run = driver.start(
        """
        sys.stdout.write("before;")  # in the parent's buffer at the fork
        def work(context):
            dist = meet(context)
            import torch
            total = torch.ones(1)
            dist.all_reduce(total)
            if context.rank == 0:
                print(int(total), torch.get_num_threads() >= 1)
            dist.destroy_process_group()
            if context.rank:
                time.sleep(0.3)  # rank 0 serves the store and must still run
                context.store().add("late", 1)
        """,
        world=3,
        preload=TORCH,
    )
    assert driver.end(run) == (0, "before;3 True\n", "")


def test_sigterm_lets_every_rank_finish_its_step(driver: Driver) -> None:
    run = driver.start("def work(context): steps(context)")
    driver.pids(2)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")
    assert set(driver.notes("finished")) == {0, 1}


def test_sigterm_to_one_rank_is_that_ranks_flag_only(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            steps(context, until=lambda: context.rank == 0 and (HERE / "over").exists())
            note(context, "stop_requested", context.stop_requested())
        """
    )
    os.kill(driver.pids(2)[1], signal.SIGTERM)
    eventually(lambda: 1 in driver.notes("stop_requested"))
    assert run.poll() is None
    (driver.folder / "over").touch()
    assert driver.end(run) == (0, "", "")
    assert driver.notes("stop_requested") == {0: "False", 1: "True"}


def test_ctrl_c_ends_in_order_with_130(driver: Driver) -> None:
    run = driver.start("def work(context): steps(context)")
    driver.pids(2)
    os.killpg(run.pid, signal.SIGINT)  # like a terminal, send the signal to the parent and to the ranks
    assert driver.end(run) == (130, "", "")
    assert set(driver.notes("finished")) == {0, 1}


def test_a_second_ctrl_c_kills_at_once(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            while not context.stop_requested():
                time.sleep(0.01)
            note(context, "stubborn")
            time.sleep(60)
        """
    )
    driver.pids(2)
    run.send_signal(signal.SIGINT)
    eventually(lambda: len(driver.notes("stubborn")) == 2)
    run.send_signal(signal.SIGINT)
    assert driver.end(run, 30) == (130, "", "")


def test_a_stop_while_torch_is_imported(driver: Driver) -> None:
    (driver.folder / "slow_import.py").write_text(
        f"import pathlib, time\npathlib.Path({str(driver.folder)!r}, 'importing').touch()\ntime.sleep(60)"
    )
    run = driver.start("def work(context): steps(context)", preload=("slow_import",))
    eventually((driver.folder / "importing").exists)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run, 30) == (0, "", "")
    assert not driver.notes("pid")


def test_a_suspended_rank_gets_the_stop(driver: Driver) -> None:
    run = driver.start("def work(context): steps(context)")
    os.kill(driver.pids(2)[1], signal.SIGSTOP)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")


def test_a_closed_pipe_does_not_end_the_run(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            step = 0
            while not context.stop_requested() and not (HERE / "end").exists():
                if context.rank == 0:
                    (HERE / "written").write_text(str(step))
                    print(json.dumps({"step": step}))
                step += 1
                time.sleep(0.01)
            note(context, "finished", step)
        """
    )
    assert run.stdout and run.stderr
    assert json.loads(run.stdout.readline()) == {"step": 0}
    run.stdout.close()
    # the file is written before the step's line is printed, and is empty for a short time in each step
    written = driver.folder / "written"
    left = int(written.read_text() or 0)
    eventually(lambda: int(written.read_text() or 0) > left + 20)
    (driver.folder / "end").touch()
    assert (
        run.stderr.read()
        == "cannot write to standard output: its reader has closed it; the run continues without it\n"
    )
    assert run.wait(TIMEOUT_S) == 0
    assert int(driver.notes("finished")[0]) > left + 20


# -------------------------------------------------------------------------------------------------- failures


def test_an_error_in_one_rank_among_many_in_a_collective(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            dist = meet(context)
            import torch
            note(context, "pid", os.getpid())
            for step in range(100):
                context.set_operation(step, "tp all-gather, layer 2")
                if context.rank == 1 and step == 3:
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
    assert rest[-1] == f"reports of all ranks: {reports}"
    assert all(f"\nrank {rank} (dp{rank}) " in reports.read_text() for rank in range(3))
    assert (status, out) == (1, "")


def test_a_killed_rank_is_the_root_cause(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            dist = meet(context)
            import torch
            note(context, "pid", os.getpid())
            for step in range(10_000):
                context.set_operation(step, "dp all-reduce")
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


def test_a_rank_that_dies_before_the_process_group_exists(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            if context.rank == 0:
                raise MemoryError
            meet(context)
        """,
        preload=TORCH,
    )
    status, _, err = driver.end(run)
    assert (status, err.splitlines()[0]) == (1, "rank 0 (dp0) failed before its first step: MemoryError")


def test_a_rank_that_exits_with_status_0_too_early(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            if context.rank == 1:
                os._exit(0)
            steps(context)
        """
    )
    status, _, err = driver.end(run)
    assert status == 1
    assert err.startswith(
        "rank 1 (dp1) exited with status 0 before its first step without completing its work\n"
    )


def test_a_straggler_is_killed_and_its_stack_reported(driver: Driver) -> None:
    run = driver.start(
        """
        def hang_here():
            time.sleep(60)
        def work(context):
            note(context, "pid", os.getpid())
            context.set_operation(7, "a checkpoint")
            if context.rank == 1:
                hang_here()
        """,
        timeouts={"straggler_s": 0.3},
    )
    status, _, err = driver.end(run)
    assert status == 1
    assert err.startswith(
        "rank 1 (dp1) reported no progress for 0.3 s after other ranks had ended and was killed at step 7 "
        "in a checkpoint\n"
    )
    assert "in hang_here" in (driver.run_dir / "failure.txt").read_text()


def test_a_rank_that_reports_its_waiting_is_not_killed(driver: Driver) -> None:
    """Rank 0 completes the last checkpoint alone, which may take longer than the timeout."""
    run = driver.start(
        """
        def work(context):
            if context.rank == 0:
                for n in range(20):
                    context.set_operation(7, f"waiting for the checkpoint, {n} s")
                    time.sleep(0.1)
        """,
        timeouts={"straggler_s": 0.8},
    )
    status, _, err = driver.end(run)
    assert (status, err) == (0, "")


def test_ranks_that_hang_after_a_stop_request_are_killed(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            context.set_operation(7, "ep all-to-all")
            time.sleep(60)
        """,
        timeouts={"stuck_s": 0.5},
    )
    driver.pids(2)
    run.send_signal(signal.SIGTERM)
    status, _, err = driver.end(run)
    assert status == 1
    assert (
        "did not stop after the stop request (no progress on any rank for 0.5 s) and was killed at step 7 "
        "in ep all-to-all" in err
    )


LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only the kernel of Linux can kill a process when its parent dies"
)


@pytest.mark.parametrize(
    "busy",
    [
        pytest.param("time.sleep(60)", id="at work"),
        pytest.param("context.rank and time.sleep(60)", id="serving the store"),
        pytest.param("ctypes.PyDLL(None).sleep(60)", id="in C, with the interpreter's lock", marks=LINUX),
        pytest.param("(ctypes.CDLL(None).prctl(1, 0), time.sleep(60))", id="without the kernel", marks=LINUX),
    ],
)
def test_no_process_outlives_a_killed_parent(driver: Driver, busy: str) -> None:
    run = driver.start(
        f"""
        def work(context):
            import ctypes
            note(context, "pid", os.getpid())
            {busy}
        """,
        hub="auto",
    )
    pids = driver.pids(2)
    eventually((driver.run_dir / "hub.json").exists)
    pids.append(json.loads((driver.run_dir / "hub.json").read_text())["pid"])
    run.kill()
    eventually(lambda: all(gone(pid) for pid in pids), 30)


def test_root_cause() -> None:
    def raised(rank: int, error: BaseException) -> Outcome:
        return Outcome(rank, status=1, report=report_of(rank, LastOperation(4, "x"), error))

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


def test_a_killed_hub_comes_back_at_the_same_address(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "hub", context.hub)
            steps(context)
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
    assert "the hub was killed by SIGKILL; it restarts in 0." in (driver.run_dir / "hub.log").read_text()
    assert set(driver.notes("hub").values()) == {first["endpoints"]["ranks"]}
    assert not any(gone(pid) for pid in pids)
    run.send_signal(signal.SIGTERM)
    assert driver.end(run) == (0, "", "")
    assert gone(int(str(second["pid"])))
    assert not Path(first["endpoints"]["ranks"].removeprefix("ipc://")).parent.exists()


def test_a_hub_that_keeps_failing_is_not_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "hub.log"
    supervisor = HubSupervisor([sys.executable, "-S", "-c", "raise SystemExit('no room')"], log)
    supervisor.start()
    end = time.monotonic() + TIMEOUT_S
    while (supervisor.seconds_to_restart() or 0) < 10 and time.monotonic() < end:
        supervisor.tick()
        time.sleep(0.02)
    supervisor.close()
    assert log.read_text().count("no room") == RESTARTS_A_MINUTE
    assert log.read_text().count("the hub ended with status 1; it restarts in") == RESTARTS_A_MINUTE
    assert capsys.readouterr().err.count("the run continues without it") == 1


# ---------------------------------------------------------------------------------------- torchrun and Slurm


def test_last_operations(tmp_path: Path) -> None:
    context = single_rank_context(tmp_path)
    assert context.last_operation() is None
    context.set_operation(0, "é" * 200)
    assert context.last_operation() == LastOperation(0, "é" * 60)
    context.set_operation(41, "tp all-gather, layer 2")
    assert context.last_operation() == LastOperation(41, "tp all-gather, layer 2")
