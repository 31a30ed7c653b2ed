"""Tests that `pivot` converts dicts, one per rank, to one column per key that contains the values of all ranks."""

from hypothesis import given
from hypothesis import strategies as st

from cockpit.data.history.pivot import pivot

ROWS = st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(allow_nan=False)))


@given(ROWS)
def test_columns_have_the_values_of_the_rows(rows: list[dict[str, float]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    assert {key: list(column) for key, column in pivot(rows).items()} == {
        key: [row.get(key) for row in rows] for key in keys
    }
    assert list(pivot(rows)) == keys


def test_equal_keys_in_another_order_stay_with_their_values() -> None:
    assert pivot([{"a": 1, "b": 2}, {"b": 4, "a": 3}]) == {"a": [1, 3], "b": [2, 4]}
