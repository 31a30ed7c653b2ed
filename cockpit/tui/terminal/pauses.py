"""Keeps the screen responsive: sets when the interpreter collects garbage, and how often it switches between
threads."""

import gc
import sys

SWITCH_S = 0.0005
"""The longest time for which one thread keeps the interpreter while another waits. An event loop releases the
interpreter many times for one key. With Python's default of 5 ms, opening a dialog would wait 100 ms while the source
decodes records.
"""

YOUNG, MIDDLE, OLD = 2_000, 10, 40
"""Thresholds of the garbage collector. Drawing creates thousands of short-lived objects, hardly any in cycles.
"""

DUE = 5
"""Collections of the middle generation after which a full collection is due at the next opportunity. At this point it
takes 10 to 20 ms. After `OLD` of them it would take 80 ms, mostly for dialogs that were opened and closed.
"""


def start_without_pauses() -> None:
    """Disable garbage collection until `short_pauses` is called, because objects created at startup live until the
    process ends.
    """
    gc.disable()


def short_pauses() -> None:
    """Exempt all existing modules and objects from garbage collection, and run garbage collection less often. Without
    this call, each full collection freezes the screen for about a tenth of a second.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    gc.enable()
    sys.setswitchinterval(SWITCH_S)


def collect_if_due() -> None:
    """Run a full garbage collection if one is due. Call this function only while no key press waits for its effect to
    be drawn."""
    if gc.get_count()[2] >= DUE:
        gc.collect()
