"""Imports modules without garbage collections."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while the `with` block imports modules; then exempt all existing objects from later
    collections.

    The modules of torch and the engine create half a million objects that live until the process ends. Without this
    function, garbage collections took a tenth of the CPU time of the imports.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
