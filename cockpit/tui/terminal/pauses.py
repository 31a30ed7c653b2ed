"""Keeps pauses short: sets how the interpreter shares its time between screen, source thread and garbage collector."""

import gc
import sys

SWITCH_S = 0.0005
"""The longest time for which one thread keeps the interpreter while another waits. An event loop releases the
interpreter many times for one key. With Python's default of 5 ms, opening a dialog would wait 100 ms while the source
decodes records.
"""

YOUNG, MIDDLE, OLD = 2_000, 10, 40
"""Thresholds of the garbage collector. Drawing creates thousands of short-lived objects, hardly any in cycles."""


def start_without_pauses() -> None:
    """Collect no garbage until `short_pauses` is called, because the objects that are created at the start exist as
    long as the process.
    """
    gc.disable()


def short_pauses() -> None:
    """Exempt the modules and objects that live as long as the process from garbage collection, and collect more rarely.
    Without this, each full garbage collection stops the screen for about a tenth of a second.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    gc.enable()
    sys.setswitchinterval(SWITCH_S)
