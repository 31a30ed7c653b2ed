"""On GPUs, the loss, the unclipped gradient norm and every gradient equal those of the single-process reference on the
CPU, except for rounding."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.one_rank import ONE_RANK
from tests.ranks.batches import batched, marked, runner
from tests.ranks.cases.case import Case
from tests.ranks.cases.cases import TELLING, steps_of
from tests.ranks.parity.comparison import assert_equal_except_for_rounding


def fits(case: Case) -> bool:
    """Whether there is a GPU for each rank of the case, and its attention has a kernel for GPUs."""
    layout = case.layout
    masked = layout.data.separate_documents or layout.model.window is not None
    return 1 < layout.ranks.world <= torch.cuda.device_count() and not masked


CASES = ONE_RANK | {name: case for name, case in TELLING.items() if fits(case)}
BATCHES = batched("parity on GPUs", list(CASES), list(CASES))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs a parity case on GPUs, if it has not run yet, and returns the folder with its results."""
    module, options = "tests.ranks.parity", ["--device", "cuda"]
    return runner(module, BATCHES, tmp_path_factory.mktemp, timeout_s=280, options=options)


@pytest.mark.parametrize("name", marked(list(CASES), BATCHES))
def test_equals_one_process_on_the_cpu(name: str, run: Callable[[str], Path]) -> None:
    result = json.loads((run(name) / "result.json").read_text())
    assert_equal_except_for_rounding(CASES[name], result, steps_of(name))
    assert result["dropped"] == result["dropped_in_one_process"] or not CASES[name].fp64
