"""Runs torch on one thread: the tensors of these tests are small, and on a busy machine, several threads would spend
most of the time waiting for each other."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # many of these tests do not need torch
    threads = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(threads)
