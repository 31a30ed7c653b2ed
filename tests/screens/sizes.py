"""Sizes of terminals that the screens are tested at."""

import pytest

SMALLEST, MIDDLE, LARGEST = (80, 24), (120, 36), (200, 60)
# what a test asserts is hardest to hold at the smallest size; `make test-all` runs the others too
SIZES = [
    pytest.param(SMALLEST, id="80x24"),
    pytest.param(MIDDLE, id="120x36", marks=pytest.mark.exhaustive),
    pytest.param(LARGEST, id="200x60", marks=pytest.mark.exhaustive),
]
# a picture shows most of a screen at the middle size
PICTURES = [
    pytest.param(SMALLEST, id="80x24", marks=pytest.mark.exhaustive),
    pytest.param(MIDDLE, id="120x36"),
    pytest.param(LARGEST, id="200x60", marks=pytest.mark.exhaustive),
]
