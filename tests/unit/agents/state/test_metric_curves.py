"""The curve of a metric has buckets of equal width, which depend only on the metric's values and not on their order of
arrival."""

import math
from copy import copy
from itertools import pairwise
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from agents.protocol import Bucketed, Recalled, Summary, codec
from agents.state.metric_curves import BUCKETS, METRICS, Curve
from tests.unit.agents.fleet import make_summary

VALUES = st.one_of(st.none(), st.integers(-3, 3).map(float), st.sampled_from([math.inf, -math.inf]))


def at(step: int, loss: float | None) -> Summary:
    return structs.replace(make_summary(step), loss=loss)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 200), VALUES, min_size=1), st.data())
def test_a_curve_depends_only_on_its_values(losses: dict[int, float | None], data: st.DataObject) -> None:
    with mock.patch("agents.state.metric_curves.BUCKETS", 8):
        told = [at(step, losses[step]) for step in sorted(losses)]
        one_by_one, at_once, in_parts = Curve(), Curve(), Curve()
        for summary in told:
            one_by_one.extend([summary])
        at_once.extend(told)
        place = data.draw(st.integers(0, len(told)))
        older = Curve()
        older.extend(told[:place])
        in_parts.extend(told[place:])
        for part in older.parts():
            in_parts.insert(part)
        assert one_by_one == at_once == in_parts
        for metric in METRICS:
            points = dict(at_once.points(metric))
            known = {one.step: float(v) for one in told if (v := getattr(one, metric)) is not None}
            assert points.items() <= known.items()
            buckets: dict[int, list[int]] = {}
            for step in known:
                buckets.setdefault(step // at_once.width, []).append(step)
            assert len(buckets) <= 8
            for steps in buckets.values():
                kept = [points[step] for step in steps if step in points]
                assert len(kept) <= 5 and min(steps) in points and max(steps) in points
                finite = [known[step] for step in steps if math.isfinite(known[step])]
                if finite:
                    still = [value for value in kept if math.isfinite(value)]
                    assert (min(still), max(still)) == (min(finite), max(finite))
                assert len(finite) == len(steps) or not all(map(math.isfinite, kept))


def test_buckets_are_even_for_any_length() -> None:
    curve = Curve()
    for step in range(0, 50_000, 10):
        curve.extend([at(step, math.sin(step))])
    steps = [step for step, _ in curve.points("loss")]
    assert curve.width == 64 and BUCKETS / 2 < len({step // 64 for step in steps}) <= BUCKETS
    assert max(b - a for a, b in pairwise(steps)) <= 64


def test_a_copy_is_independent_and_a_cut_removes_steps() -> None:
    curve = Curve()
    curve.extend(at(step, 1.0) for step in range(3000))
    still = copy(curve)
    curve.cut(100)
    assert (curve.last, still.last, curve.width) == (99, 2999, 4)
    curve.cut(0)
    assert curve == Curve() and not curve and curve.first is None


def test_parts_fit_into_messages_and_insert_anywhere() -> None:
    curve = Curve()
    losses = (1e6 + (step * 7919) % 1000 / 7 for step in range(2**40, 2**40 + 2**14))
    curve.extend(at(2**40 + place, loss) for place, loss in enumerate(losses))
    for part in curve.parts():
        packed = codec.pack(Recalled(curve=[part]))
        assert not codec.unreadable(packed)
    hostile = Curve()
    for part in (
        Bucketed("no metric", 1, [1], [1.0]),
        Bucketed("loss", 2**53, [2**53, 0, 7], [1.0, 2.0]),
        Bucketed("lr", 3, [], []),
    ):
        hostile.insert(part)
    assert hostile.points("loss") == [(0, 2.0), (2**53, 1.0)] and list(hostile.series) == ["loss"]
