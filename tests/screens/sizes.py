"""The terminal sizes at which the screens are tested."""

import pytest

SMALLEST, MIDDLE, LARGEST = (80, 24), (120, 36), (200, 60)
# assertions are hardest to satisfy at the smallest size; `make test-all` also runs the others
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
