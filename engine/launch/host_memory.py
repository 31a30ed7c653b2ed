"""Sets up glibc's allocator on a rank that trains on the CPU, so that freed memory is returned to the kernel."""

import ctypes
import os
from collections.abc import Mapping

OWN_PAGES = 4 << 20
"""Bytes. A block of at least this size gets separate pages, which are returned to the kernel as soon as it is freed.

By default, glibc raises this limit to the size of each such block that is freed, up to 32 MiB (mallopt(3),
M_MMAP_THRESHOLD). With that default, gathered weights, gradients and buffers of a few MiB are in the heap between
blocks that live longer, and the heap of a rank with 256 MiB of weights held 40 % more than its tensors
(docs/measurements.md). Smaller blocks stay in the heap, because fresh pages cost time.
"""

# Names of parameters of mallopt, in malloc.h of glibc, and their values. The limit on free memory at the end of the
# heap is twice the other limit, as in glibc's own rule.
LIMITS = {-3: OWN_PAGES, -1: 2 * OWN_PAGES}
CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Set the allocator's limits for this process, and return whether they were set. The limits are not set if the C
    library is not glibc, or if `environ` contains the user's own settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in CHOSEN_BY_USER):
        return False
    return all(mallopt(name, size) == 1 for name, size in LIMITS.items())
