"""Tests how the cells of the expert map are divided among layers and experts."""

import pytest

from cockpit.tui.widgets.experts.figures import FEWEST, wide
from cockpit.tui.widgets.experts.heat import fold


@pytest.mark.parametrize("width", [72, 76, 80])
def test_figures_give_way_if_each_expert_then_has_a_cell(width: int) -> None:
    found = fold(range(4), 64, width, 20)
    assert found.across == 1 and found.wide + wide(found.columns) <= width


def test_experts_share_cells_where_even_the_bare_map_has_no_room() -> None:
    found = fold(range(4), 64, 60, 20)
    assert found.across == 2 and list(found.columns)[: len(FEWEST)] == list(FEWEST)
