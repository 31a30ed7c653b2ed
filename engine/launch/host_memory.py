"""Settings of glibc's allocator for a rank that trains on the CPU: memory that it frees goes back to the kernel."""

import ctypes
import os
from collections.abc import Mapping

OWN_PAGES = 4 << 20
"""Bytes. A block of at least this size gets pages of its own, which the kernel takes back as soon as it is freed.

By itself, glibc raises this limit to the size of each such block that is freed, up to 32 MiB (mallopt(3),
M_MMAP_THRESHOLD). Then gathered weights, gradients and buffers of a few MiB lie in the heap, between others that live
longer, and the heap of a rank with 256 MiB of weights held 40 % more than its tensors (docs/measurements.md). Smaller
blocks stay in the heap, because fresh pages cost time.
"""

# Names of parameters of mallopt, in malloc.h of glibc, and their values. The other limit, of free memory at the end of
# the heap, is twice the first, as glibc sets it.
LIMITS = {-3: OWN_PAGES, -1: 2 * OWN_PAGES}
CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Set the limits for this process. Returns whether they were set. They are not set without glibc, or if `environ`
    has the user's own settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in CHOSEN_BY_USER):
        return False
    return all(mallopt(name, size) == 1 for name, size in LIMITS.items())
