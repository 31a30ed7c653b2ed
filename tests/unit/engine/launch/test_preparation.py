"""Ranks of torchrun or Slurm that need different times to prepare their start. Each rank is a thread."""

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from agents.rundir.runs import RunError
from engine.checkpoint import reading
from engine.launch.processes import preparation
from engine.launch.processes.preparation import Preparation
from engine.rendezvous import RankContext

WORLD = 3


def on_all(work: Callable[[Preparation, int], object]) -> list[object]:
    """Run the preparation of each rank in a thread, and return the results or errors."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> object:
        context = RankContext(rank, WORLD, rank, WORLD, None, Path(), lambda: store)
        try:
            with Preparation(context) as prepared:
                return work(prepared, rank)
        except (RunError, OSError) as error:
            return str(error)

    with ThreadPoolExecutor(WORLD) as ranks:
        return list(ranks.map(run, range(WORLD)))


@pytest.fixture
def sums(tmp_path: Path) -> dict[str, int]:
    """Checksums of seven files, two of which have changed."""
    names = [f"rank-{number}.bin" for number in range(7)]
    for name in names:
        (tmp_path / name).write_text(name)
    sums = {name: zlib.crc32(name.encode()) for name in names}
    for number in (2, 6):  # in the share of rank 2 and in that of rank 0
        (tmp_path / names[number]).write_text("changed")
    return sums


def test_each_rank_checks_its_share_of_a_checkpoint(
    tmp_path: Path, sums: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 2, which reads data for a long time. Rank 1 does not see a file that rank 0 sees."""
    checked: dict[int | None, list[str]] = {}
    ranks: dict[int, int] = {}
    slow = threading.Event()

    def changed_files(folder: Path, sums: dict[str, int]) -> list[str]:
        rank = ranks[threading.get_ident()]
        checked.setdefault(rank, []).extend(sums)
        if rank == 0:
            slow.set()
        unseen = ["rank-4.bin"] if rank == 1 else []
        return reading.changed_files(folder, sums) + unseen

    def work(prepared: Preparation, rank: int) -> list[str]:
        ranks[threading.get_ident()] = rank
        found: list[str] = []
        if rank == 0:
            found = prepared.changed_files(tmp_path, sums)
            assert prepared.changed_files(tmp_path, {"rank-1.bin": sums["rank-1.bin"]}) == []
        if rank == 2:
            slow.wait()
        prepared.meet()
        return found

    monkeypatch.setattr(preparation, "changed_files", changed_files)
    found, *_ = on_all(work)
    assert sorted(found) == ["rank-2.bin", "rank-6.bin"]  # type: ignore[call-overload]
    first = [f"rank-{number}.bin" for number in (0, 3, 6)]
    again = [f"rank-{number}.bin" for number in (4, 2)]
    assert checked[0] == [*first, *again, "rank-1.bin"]
    assert checked[1] == ["rank-1.bin", "rank-4.bin"] and checked[2] == ["rank-2.bin", "rank-5.bin"]


def test_ranks_wait_longer_than_a_silent_rank_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as rank 2 shows signs of life, the others wait for it."""
    monkeypatch.setattr(preparation, "ALIVE_S", 0.02)
    monkeypatch.setattr(preparation, "SILENT_S", 0.5)

    def work(prepared: Preparation, rank: int) -> str:
        if rank == 2:
            threading.Event().wait(1.5)
        prepared.meet()
        return "ready"

    assert on_all(work) == ["ready"] * WORLD


def test_a_rank_that_fails_ends_the_wait_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "ALIVE_S", 0.02)

    def work(prepared: Preparation, rank: int) -> None:
        if rank == 2:
            raise OSError("no data")
        prepared.meet()

    lost = "cannot start: rank 2 has ended"
    assert on_all(work) == [f"rank 0 {lost}", "rank 1 cannot start: rank 0 has ended", "no data"]


def test_a_rank_without_a_sign_of_life_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "ALIVE_S", 0.02)
    monkeypatch.setattr(preparation, "SILENT_S", 0.3)
    over = threading.Event()

    def work(prepared: Preparation, rank: int) -> None:
        if rank == 2:
            prepared._over.set()  # as if the process hung
            over.wait()
            return
        try:
            prepared.meet()
        finally:
            over.set()

    found = on_all(work)
    assert found[0] == "rank 0 cannot start: rank 2 has shown no sign of life for 0.3 s"
