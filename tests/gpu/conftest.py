"""Skips the tests of this folder on a machine without a GPU."""

import pytest

from engine.device import usable_gpus


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not usable_gpus():
        pytest.skip("needs a GPU and NCCL")
