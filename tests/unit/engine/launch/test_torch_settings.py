"""The PyTorch settings that the engine applies before a run: flight recorder, determinism, timeouts."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.launch.torch_settings import (
    record_flight,
    set_timeouts,
    time_out_after,
    use_deterministic_algorithms,
)
from engine.rendezvous import single_rank_context
from tests.unit.engine.config.test_layout import DEMO


def test_the_flight_recorder_dumps_into_the_runs_folder(tmp_path: Path) -> None:
    environ = {"TORCH_FR_BUFFER_SIZE": "7"}
    folder = record_flight(environ, tmp_path)
    assert folder.is_dir() and environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{folder}/rank_"
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_determinism_is_on_and_fills_no_memory(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_groups_get_the_layouts_time_out(tmp_path: Path) -> None:
    store = single_rank_context(tmp_path).store()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=time_out_after(77))
    try:
        late = dist.new_group(backend="gloo")
        set_timeouts([late, None], None)
        assert late._get_backend(torch.device("cpu")).options._timeout != timedelta(seconds=77)
        set_timeouts([late, None], 77)
        default = dist.distributed_c10d._get_default_group()
        for group in (default, late):
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_a_time_out_of_0_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"run\.timeout_s"):
        load(DEMO, ["run.timeout_s=0"])
