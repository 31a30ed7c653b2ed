"""Which ranks of a wrapped program have the same batch is read from the program's device mesh."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from agents.loop.coordinates import batch_of
from agents.wrap.joining import MODEL_AXES, coordinates_in_mesh

shape, names = json.loads(sys.argv[1])
found = []
dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
part = mesh[names[-1]]
coords = coordinates_in_mesh(5, 8)
print(json.dumps([coords, batch_of(coords, MODEL_AXES)]))
"""


@pytest.mark.parametrize(
    ("shape", "names", "coords", "batch"),
    [
        ((2, 2, 2), ("pp", "dp_shard", "tp"), {"pp": 1, "dp_shard": 0, "tp": 1}, [0]),
        ((4, 1, 2), ("dp", "cp", "tp"), {"dp": 2, "tp": 1}, [2]),
        ((4, 2), ("replicate", "shard"), {"dp": 5}, None),
    ],
)
def test_coordinates_are_read_from_the_mesh_of_the_program(
    shape: tuple[int, ...], names: tuple[str, ...], coords: dict[str, int], batch: list[int] | None
) -> None:
    words = [sys.executable, "-c", PROGRAM, json.dumps([shape, names])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [coords, batch]
