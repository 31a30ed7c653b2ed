"""The settings that a re-layout changes, as text; error messages for invalid text; and the nearest smaller layout."""

import pytest

from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.relayout import changed_text, layout_text, relaid, smaller
from engine.config.toml import load

DEMO = "layouts/demo.toml"


def test_a_text_describes_one_arrangement_and_nothing_else() -> None:
    demo = load(DEMO)
    text = layout_text(demo)
    assert text == "grid.pp=2 grid.dp_shard=2 grid.tp=2 grid.ep=4 knobs.micro_batches=4"
    other = relaid(demo, "grid.tp=2 grid.dp_shard=4 train.zero=3 knobs.recompute=full")
    assert (other.grid.pp, other.grid.ep, other.train.zero, other.model, other.train.lr) == (
        1,
        1,
        3,
        demo.model,
        demo.train.lr,
    )
    assert relaid(other, text) == demo
    assert changed_text(demo, relaid(demo, text.replace("tp=2", "tp=1").replace("ep=4", "ep=2"))) == (
        "grid.tp 2 -> 1, grid.ep 4 -> 2"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model.layers=2", "'model.layers' cannot change while a run is live; legal: grid.pp"),
        ("train.lr=1", "cannot change while a run is live"),
        ("nonsense", "cannot change while a run is live"),
        ("grid.tp=2 grid.tp=1", "grid.tp is given twice"),
        ("grid.tp=3", "does not divide model.heads = 4"),
        ("grid.tp=two", "grid.tp = 'two' is not legal; legal"),
        ("grid.dp_shard=5", "train.global_batch"),
    ],
)
def test_an_illegal_text_is_refused(text: str, why: str) -> None:
    with pytest.raises(LayoutError) as refused:
        relaid(load(DEMO), text)
    assert why in str(refused.value)


def sizes(layout: Layout) -> tuple[int, ...]:
    grid = layout.grid
    return grid.pp, grid.dp_replicate, grid.dp_shard, grid.tp, grid.ep


def test_the_nearest_smaller_layout_gives_up_replicas_first() -> None:
    demo = load(DEMO, ["grid.dp_replicate=2"])  # 16 ranks
    assert sizes(next(smaller(demo, 15, 1))) == (2, 1, 2, 2, 4)
    assert sizes(next(smaller(load(DEMO), 7, 1))) == (2, 1, 1, 2, 2)
    assert sizes(next(smaller(load(DEMO, ["train.global_batch=24", "grid.dp_shard=3", "grid.ep=1"]), 11, 1))) == (
        2, 1, 2, 2, 1,
    )  # fmt: skip
    assert next(smaller(load(DEMO), 7, 5), None) is None
