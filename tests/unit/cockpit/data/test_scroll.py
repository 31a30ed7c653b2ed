"""The visible part of a long list: it follows the newest item until the cursor moves up, stays near an item that is
dropped, and shows a short list in full."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cockpit.data.scroll import Scroll, Visible


def seen(scroll: Scroll, items: list[int], height: int, tall: Callable[[int], int] = lambda at: 1) -> Visible:
    found: Any = {item: at for at, item in enumerate(items)}
    return scroll.visible(len(items), found.get, tall, height)


def move(scroll: Scroll, items: list[int], by: int) -> None:
    scroll.move(by, len(items), lambda at: items[at])


def test_follows_the_newest_until_the_cursor_moves_up() -> None:
    scroll, items = Scroll(), list(range(20))
    assert [at for at, _ in seen(scroll, items, 5).lines] == [15, 16, 17, 18, 19]
    items += [20, 21]
    assert seen(scroll, items, 5).lines[-1] == (21, 0)
    move(scroll, items, -1)
    before = seen(scroll, items, 5)
    items += range(22, 34)
    after = seen(scroll, items, 5)
    assert after.lines == before.lines and (before.below, after.below) == (0, 12)
    items = items[10:]  # the oldest were dropped: the same items stay on the same lines
    assert [items[at] for at, _ in seen(scroll, items, 5).lines] == [17, 18, 19, 20, 21]
    move(scroll, items, 100)
    assert scroll.following and seen(scroll, items, 5).below == 0


def test_an_item_that_is_gone_leaves_the_cursor_nearby() -> None:
    scroll, items = Scroll(), list(range(20))
    seen(scroll, items, 5)
    move(scroll, items, -10)
    assert seen(scroll, items, 5).cursor == 9
    assert seen(scroll, [0, 1, 2], 5).cursor == 2


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.integers(1, 12),
    st.lists(st.integers(-8, 8), max_size=8),
)
def test_the_window_is_full_and_shows_the_cursor(heights: list[int], height: int, moves: list[int]) -> None:
    scroll, items = Scroll(), list(range(len(heights)))
    for by in [0, *moves]:
        move(scroll, items, by)
        window = seen(scroll, items, height, lambda at: heights[at])
        assert len(window.lines) == min(height, sum(heights))
        assert (window.cursor, 0) in window.lines
        everything = [(at, n) for at, tall in enumerate(heights) for n in range(tall)]
        start = everything.index(window.lines[0])
        assert everything[start : start + len(window.lines)] == window.lines
