"""Names and number formats of the quantities that previews predict and that are checked after the change."""

from collections.abc import Callable

from cockpit.data import format

NumberFormat = Callable[[float], tuple[str, str]]
"""Formats a value as a number and its unit."""


def bytes_of(value: float) -> tuple[str, str]:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.1f}", unit
    return f"{value:.0f}", "B"


def sent(value: float) -> tuple[str, str]:
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB")):
        if value >= size:
            return f"{value / size:.2f}", unit
    return f"{value / 1e6:.1f}", "MB"


def ms(value: float) -> tuple[str, str]:
    return (f"{value / 1000:.1f}", "s") if value >= 10_000 else (format.grouped(round(value)), "ms")


def share(value: float) -> tuple[str, str]:
    return f"{100 * value:.1f}", "%"


def plain_number(value: float) -> tuple[str, str]:
    return (f"{value:.4g}" if abs(value) < 1e4 else format.grouped(round(value))), ""


def thousands(value: float) -> tuple[str, str]:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}", unit
    return f"{value:.0f}", ""


# Label and number format by quantity. Less is better, apart from `MORE_IS_BETTER`.
QUANTITIES: dict[str, tuple[str, NumberFormat]] = {
    "step_ms": ("step time", ms),
    "bubble": ("bubble", share),
    "bubble_bound": ("bubble bound", share),
    "memory_bytes": ("memory", bytes_of),
    "peak_bytes": ("planned peak", bytes_of),
    "comm_bytes": ("traffic", sent),
    "a2a_bytes": ("all-to-all", sent),
    "dropped": ("dropped", plain_number),
    "tokens_per_s": ("tokens/s", thousands),
    "mfu": ("MFU", share),
}
MORE_IS_BETTER = frozenset({"tokens_per_s", "mfu"})


def label_and_format(quantity: str) -> tuple[str, NumberFormat]:
    """The label and the number format of a quantity. The label of an unlisted quantity is its name without the unit
    suffix."""
    if quantity in QUANTITIES:
        return QUANTITIES[quantity]
    for ending, formatted in (("_ms", ms), ("_bytes", bytes_of)):
        if quantity.endswith(ending):
            return format.clean(quantity.removesuffix(ending)).replace("_", " "), formatted
    return format.clean(quantity).replace("_", " "), plain_number
