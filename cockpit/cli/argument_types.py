"""Argument types of `cockpit`: each parses a string, or raises an error that says what is legal."""

import argparse
from contextlib import suppress

from agents.protocol import MOST_TRIAL_STEPS
from agents.protocol.base import TEXT
from agents.protocol.stacks import MOST_RANKS
from cockpit.data.sources.connection import CockpitError

MOST = 2**31 - 1  # largest whole number of an option


def seconds(text: str) -> float:
    """Parse a positive, finite number, such as a number of seconds."""
    with suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise _illegal(text, "a number above 0")


def _whole(text: str, least: int, most: int) -> int:
    with suppress(ValueError):
        value = int(text)
        if least <= value <= most:
            return value
    raise _illegal(text, f"a whole number from {least} to {most}")


def steps(text: str) -> int:
    """Parse the number of steps that a trial measures."""
    return _whole(text, 4, MOST_TRIAL_STEPS)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _whole(text, 1, MOST)


def ranks(text: str) -> list[int]:
    """Parse ranks given as numbers and ranges, such as ``0,3,8-11``."""
    found: list[int] = []
    with suppress(ValueError):
        for part in text.split(","):
            low, _, high = part.strip().partition("-")
            first, last = int(low), int(high or low)
            if not 0 <= first <= last < first + MOST_RANKS:
                raise ValueError
            found.extend(range(first, last + 1))
        if len(found) <= MOST_RANKS:
            return found
    raise _illegal(text, f"at most {MOST_RANKS} ranks, such as 0,3,8-11")


def _illegal(text: str, legal: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text[:40]!r} is not legal; legal: {legal}")


def reason(text: str) -> str:
    """Check the argument of --reason. Raises CockpitError if it is longer than the protocol allows."""
    if len(text) > TEXT:
        raise CockpitError(f"--reason has {len(text)} characters; legal: at most {TEXT}")
    return text
