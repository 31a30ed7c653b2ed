"""Tests the collective algorithms over gloo, an `Axis`'s choice among them by buffer size, and the command
`engine collectives`."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

from engine.collectives.measured import chosen_all_reduces
from engine.planner.hardware.table import load
from tests.ranks.driver import TIMEOUT_S, TORCH, Driver
from tests.ranks.program import Program, run
from tests.unit.cockpit.schemas import check

MEASURED = Path(__file__).with_name("measured.toml")
COMMAND = ["-m", "engine", "collectives", "--device", "cpu"]

OVER_GLOO = f"""
import torch
from engine.collectives.measured import chosen_all_reduces
from engine.collectives.choice import Choice
from engine.collectives.port import Port
from engine.collectives.table import algorithm, names, sent_bytes
from engine.collectives.parts import edges
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis

def of(rank, elements, dtype):
    "Small whole numbers, so that sums are exact in every dtype."
    return ((torch.arange(elements) * 7 + rank * 3) % 11).to(dtype)

def alone(group, world, rank):
    "Every algorithm, over every size and dtype: the number of wrong results."
    wrong = 0
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        for name in names(kind, node=2 if world % 2 == 0 else 1):
            for elements in (1, world - 1, 37, 5000):
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    node = (2 if world % 2 == 0 else 1) if name == "hierarchical" else None
                    port, x = Port.of(group), of(rank, elements, dtype)
                    algorithm(kind, name, node)(port, x)
                    all = [of(other, elements, dtype) for other in range(world)]
                    borders = edges(elements, world)
                    mine = slice(borders[rank], borders[rank + 1])
                    if kind == "all_gather":
                        parts = [all[p][borders[p] : borders[p + 1]] for p in range(world)]
                        wrong += not x.equal(torch.cat(parts))
                    else:
                        total = torch.stack(all).sum(0)
                        wrong += not (x[mine].equal(total[mine]) if kind == "reduce_scatter" else x.equal(total))
                    wrong += port.traffic.sent_bytes != sent_bytes(kind, name, port, x, node)
    return wrong

def in_axis(group, world, rank):
    "All-reduces of an axis by size: algorithm, whether the results are right, metered bytes."
    meter = Meter()
    axis = Axis("dp", group, meter)
    axis.choice = Choice(chosen_all_reduces({str(MEASURED)!r}, "gloo"), group)
    found = []
    for elements in (4, 30, 300, 1500, 5000, 30000, 100000):
        x = of(rank, elements, torch.float32)
        total = torch.stack([of(other, elements, torch.float32) for other in range(world)]).sum(0)
        name = axis.choice.name(x.nbytes)
        meter.start_step(0)
        right = axis.all_reduce(x.view(2, -1)).equal(total.view(2, -1)) and x.equal(of(rank, elements, x.dtype))
        gathered = torch.empty(world * elements)
        behind = axis.start_all_gather(gathered, x)  # its messages are under way meanwhile
        summed = x.clone()
        axis.start_all_reduce(summed).wait()
        behind.wait()
        right = right and summed.equal(total) and gathered.view(world, -1)[rank].equal(x)
        found.append([name, right, meter.readings.lanes["dp"].bytes, (world - 1) * x.nbytes])
    return found

def work(context):
    dist = meet(context)
    torch.set_num_threads(1)
    group, world, rank = dist.group.WORLD, context.world, context.rank
    wrong = alone(group, world, rank)
    note(context, "found", json.dumps([wrong, in_axis(group, world, rank)]))
    dist.destroy_process_group()
"""
ELEMENTS = (4, 30, 300, 1500, 5000, 30000, 100000)


@pytest.mark.parametrize("world", [4, 3])
def test_algorithms_over_gloo_and_the_choice_of_an_axis(world: int, driver: Driver) -> None:
    """There are no measurements for three ranks, so a group of three ranks uses those for two ranks, but never chooses
    the hierarchical algorithm."""
    from engine.collectives.parts import sent_elements

    process = driver.start(OVER_GLOO, world, preload=TORCH)
    status, _, errors = driver.end(process)
    assert status == 0, errors
    names = ["naive", "tree", "doubling", "hierarchical", "halving-doubling", "ring", "ring"]
    if world == 3:
        names = ["naive", "tree", "doubling", "halving-doubling", "halving-doubling", "ring", "ring"]
    for rank, found in driver.notes("found").items():
        wrong, by_size = json.loads(found)
        assert wrong == 0
        assert [name for name, *_ in by_size] == names
        for (name, right, metered, gathered), elements in zip(by_size, ELEMENTS, strict=True):
            assert right, (name, elements)
            sent = 4 * sent_elements("all_reduce", name, rank, world, elements, 2)
            assert metered == 2 * sent + gathered, (name, elements)


CONTROL = """
import torch
from torch import Tensor
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis

def work(context):
    dist = meet(context)
    torch.set_num_threads(1)
    rank, world = context.rank, context.world
    axis, wrong = Axis("control", dist.group.WORLD, Meter()), 0
    for turn in range(20):
        vector = torch.full((5000,), float(rank + turn), dtype=torch.float64)
        reduced = axis.start_reduce(vector, Tensor.add_)  # its messages are under way meanwhile
        mine = torch.tensor([[rank], [turn]])
        rows = torch.tensor([[[other], [turn]] for other in range(world)])
        wrong += not axis.all_gather(mine).equal(rows)
        wrong += not axis.all_reduce(mine).equal(rows.sum(0))
        works, received = axis.start_exchange(mine, sorted({rank, (rank + 1) % world, (rank - 1) % world}))
        works.wait()
        reduced.wait()
        wrong += rank == 0 and not bool((vector == sum(range(world)) + world * turn).all())
    note(context, "wrong", wrong)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [3, pytest.param(18, marks=pytest.mark.exhaustive)])
def test_the_control_plane_over_gloo(world: int, driver: Driver) -> None:
    """Groups of at most 16 ranks use one all-to-all, larger ones recursive doubling."""
    status, _, errors = driver.end(driver.start(CONTROL, world, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("wrong") == dict.fromkeys(range(world), "0")


def test_the_command_measures_and_adds_to_a_description(tmp_path: Path) -> None:
    into = tmp_path / "own.toml"
    text = MEASURED.read_text()
    into.write_text(text[: text.index("[[measured.algorithms]]")])
    options = [
        "--ranks",
        "2",
        "--node",
        "1",
        "--sizes",
        "1KiB,64KiB",
        "--quick",
        "--json",
        "--into",
        str(into),
    ]
    options += ["--kinds", "all-reduce,reduce-scatter,all-gather"]
    done = run(*COMMAND, *options, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    found = json.loads(done.stdout)
    check("engine-collectives", found)
    assert (found["ranks"], found["backend"], found["dtype"]) == (2, "gloo", "fp32")
    assert len(found["times"]) == 2 * (8 + 6 + 6) and all(time["seconds"] > 0 for time in found["times"])
    for fit in found["fits"]:
        for key in ("latency_s", "per_byte_s", "alpha_s", "beta_s"):
            middle, low, high = fit[key] or (0, 0, 0)
            assert low <= middle <= high
    hardware = load(into)
    assert hardware.measured and len(hardware.measured.algorithms) == 20
    chosen = [band["algorithm"] for band in found["chosen"] if band["kind"] == "all_reduce"]
    assert [row.algorithm for row in chosen_all_reduces(into, "gloo")] == chosen
    assert tomllib.loads(into.read_text())["device"] == tomllib.loads(text)["device"]


def test_ctrl_c_ends_it_in_order() -> None:
    command = Program(*COMMAND)
    assert "pass 1" in command.stderr.readline()  # the ranks measure
    os.killpg(command.pid, signal.SIGINT)  # like a terminal, signal the parent and the ranks
    _, rest = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130, rest
    assert "Traceback" not in rest
