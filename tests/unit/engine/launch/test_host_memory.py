"""Blocks that a rank frees go back to the kernel, even if longer-lived smaller blocks are between them."""

import subprocess
import sys

import pytest

from engine.launch.host_memory import CHOSEN_BY_USER, OWN_PAGES, give_back_freed_memory

# Without the setting, the first freed block raises glibc's threshold, and later blocks are allocated on the heap.
PROGRAM = """
import ctypes, os, sys
from engine.launch.host_memory import OWN_PAGES, give_back_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "set":
    assert give_back_freed_memory({})
bytearray(2 * OWN_PAGES)
before = resident()
blocks, between = [], []
for _ in range(8):
    blocks.append(bytearray(b"x") * OWN_PAGES)
    between.append(bytearray(b"x") * 100_000)
assert resident() - before > 7 * OWN_PAGES
blocks.clear()
print((resident() - before) / OWN_PAGES)
"""


def kept(mode: str) -> float:
    """How many of 8 freed blocks the process keeps in memory."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return float(ended.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_blocks_go_back() -> None:
    assert kept("set") < 1 < 6 < kept("not set")


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_settings_of_the_user_stay(name: str) -> None:
    assert not give_back_freed_memory({name: str(OWN_PAGES)})
