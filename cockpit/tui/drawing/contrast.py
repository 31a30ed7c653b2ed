"""Computes the contrast of colours as WCAG 2 defines it (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio), and adjusts
colours until they are readable. Colours are written as ``#rrggbb``.
"""

from typing import Final

READABLE: Final = 4.5
"""Minimum contrast of text with its background."""

VISIBLE: Final = 3.0
"""Minimum contrast of a shape that conveys information."""

_STEPS: Final = 32
Channels = tuple[int, int, int]


def channels(colour: str) -> Channels:
    """Red, green and blue, each 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """The relative luminance, 0 (black) to 1 (white)."""
    shares = [value / 255 for value in channels(colour)]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 (equal) to 21 (black and white)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mix(one: str, other: str, share: float) -> str:
    """A blend of two colours. `share` (0 to 1) is the weight of `other`."""
    pairs = zip(channels(one), channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def ink_on(background: str) -> str:
    """Black or white, whichever has the higher contrast with the background."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, background))


def readable(colour: str, background: str, least: float = READABLE) -> str:
    """`colour`, moved towards black or white until its contrast with `background` is at least `least`."""
    ink = ink_on(background)
    found = (mix(colour, ink, step / _STEPS) for step in range(_STEPS + 1))
    return next((one for one in found if contrast(one, background) >= least), ink)
