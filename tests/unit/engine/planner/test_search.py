"""Tests of the layout search: comparison with an exhaustive search, published grids, explanations."""

import json

import pytest

from engine.cli.main import main
from engine.config.checks.layout_checks import refusals
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.config.toml import load
from engine.planner.hardware.table import hardware
from engine.planner.search.explain import neighbours
from engine.planner.search.order import limits
from engine.planner.search.search import MARGIN, search
from engine.planner.search.space import Choice, choices
from engine.planner.what_if import what_if
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.planner.test_frontier_layouts import FRONTIER

H100 = hardware("H100")
SMALL = ["model.layers=8", "model.d_model=2048", "model.heads=16", "model.kv_heads=8", "model.seq_len=2048",
         "model.moe.d_expert=4096", "model.vocab=32000", "train.precision=bf16", "knobs.micro_batches=2"]  # fmt: skip


def small(*more: str) -> Layout:
    return load(DEMO, [*SMALL, *more])


def test_nothing_that_fits_is_faster() -> None:
    """Compares the search result for 4 ranks with an exhaustive search, which plans every choice in full."""
    layout, capacity = small(), MARGIN * H100.device.memory_bytes
    every = []
    for choice in choices(layout, 4, 8):
        changed = choice.of(layout)
        if not next(refusals(changed), None):
            plan = what_if(changed, H100)
            assert plan.time
            if plan.memory.peak <= capacity:
                every.append((plan.time.step_s[1], choice))
    found = search(layout, 4, H100, top=3)
    assert len(every) > 100
    # The bounds leave out small terms, so the search may miss a choice that is at most 2 % faster.
    assert found.best[0].seconds <= min(every)[0] * 1.02
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)
    assert len({one.choice.shape for one in found.best}) == 3


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama2-70b", 256),
        ("qwen3-235b-a22b", 256),
        pytest.param("gpt3-175b", 1536, marks=pytest.mark.exhaustive),
    ],
)
def test_results_are_legal_and_fit(name: str, ranks: int) -> None:
    layout = load(FRONTIER / f"{name}.toml")
    found = search(layout, ranks)
    assert found.best
    for one in found.best:
        changed = one.choice.of(layout)
        assert not list(refusals(changed)) and changed.ranks.world == ranks
        assert one.plan.fits
        # The printed overrides give the same layout.
        assert load(FRONTIER / f"{name}.toml", one.choice.changes(layout)) == changed
        assert load(FRONTIER / f"{name}.toml", one.choice.overrides(layout)) == changed
    own = what_if(layout)
    assert own.time and found.best[0].seconds <= own.time.step_s[1]


def test_the_published_grid_of_deepseek_v3_is_near_the_best() -> None:
    """The best layout has pipelines of 16 ranks and data parallelism of 128, as published. The best ep is 32 or 16
    instead of the published 64: as the explanation states, a smaller ep needs less communication."""
    layout = load(FRONTIER / "deepseek-v3.toml")
    found = search(layout, 2048)
    best = found.best[0]
    assert (best.choice.pp, best.choice.dp_shard, best.choice.tp) == (16, 128, 1) and best.choice.ep in (
        16,
        32,
    )
    around = {n.change: n.why for n in neighbours(layout, found.hardware, best)}
    slower = [
        why for change, why in around.items() if change == f"ep {best.choice.ep} -> {2 * best.choice.ep}"
    ]
    assert slower and "slower): ep +" in slower[0]
    assert any(why.startswith("does not fit: ") for why in around.values())


def test_a_change_that_only_adds_work_is_slower_and_other_orders_are_uncertain() -> None:
    layout = small()
    best = search(layout, 8, H100).best[0]
    around = {one.change: one for one in neighbours(layout, H100, best)}
    recompute, tp = around["recompute -> full"], around["tp 1 -> 2"]
    assert recompute.order == "slower" and "slower: recompute +" in recompute.why
    assert tp.order == "uncertain" and tp.why.startswith("order uncertain (")
    assert around["pp 1 -> 2"].order is None


def test_4096_gpus() -> None:
    found = search(load(FRONTIER / "deepseek-v3.toml"), 4096)
    assert found.best[0].choice.of(found.layout).ranks.world == 4096
    assert found.counts["considered"] > 10_000 > 400 >= found.counts["planned"]


def test_a_choice_of_a_layout_is_itself() -> None:
    for path in FRONTIER.glob("*.toml"):
        layout = load(path)
        assert Choice.in_layout(layout).of(layout) == layout
        assert Choice.in_layout(layout).changes(layout) == []


def test_nothing_fits() -> None:
    found = search(load(FRONTIER / "llama2-70b.toml"), 4)
    assert not found.best and found.nearest and not found.nearest.plan.fits


@pytest.mark.parametrize(
    ("ranks", "top", "says"),
    [(0, 5, "--gpus = 0 is not legal"), (8, 0, "--top = 0 is not legal"), (70_000, 5, "legal: a whole number from 1"),
     (11, 5, "no legal layout has 11 ranks")],
)  # fmt: skip
def test_bad_numbers(ranks: int, top: int, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        search(small(), ranks, H100, top)
    with pytest.raises(RefusedError, match="a search needs a machine"):
        search(small(), 8)


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(FRONTIER / "llama2-70b.toml")
    code, text, _ = run(["plan", path, "--search", "--gpus", "64"], capsys)
    assert code == 0 and all(len(line) <= 80 or path in line for line in text.splitlines()), text
    code, out, _ = run(["plan", path, "--search", "--gpus", "64", "--json"], capsys)
    tree = json.loads(out)
    assert code == 0 and tree.keys() == {"layout", "counts", "tied", "best", "nearest", "changes"}
    steps = [one["plan"]["step_s"] for one in tree["best"]]
    candidates = [one["may_be_fastest"] for one in tree["best"]]
    assert tree["tied"] == sum(candidates) > 1 and candidates[0]
    assert all(
        step < limits().other_split * steps[0] for step, may in zip(steps, candidates, strict=True) if may
    )
    numbers = ", ".join(str(number) for number, may in enumerate(candidates, 1) if may)
    assert f"Any of {numbers} may be the fastest" in text
    for change in tree["changes"]:
        assert (change["order"] == "uncertain") == (
            "order uncertain" in change["why"] or "as fast" in change["why"]
        )
    assert "uncertain" in {change["order"] for change in tree["changes"]}
    first = tree["best"][0]
    code, out, _ = run(["plan", path, *first["overrides"], "--json"], capsys)
    assert json.loads(out)["step_s"] == first["plan"]["step_s"]
    assert run(["plan", path, "--search", "--gpus", "4"], capsys)[0] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "engine plan needs a layout as first argument"),
        (["plan", "grid.pp=2"], "engine plan needs a layout as first argument"),
        (["plan", "absent.toml"], "cannot read the layout absent.toml"),
        (["plan", str(DEMO), "--wrong"], "engine plan has no option --wrong; see engine plan --help"),
        (["plan", str(DEMO), "--hardware", "h10"], "hardware 'h10' is not known; did you mean H100?"),
        (["plan", str(DEMO), "--hardware", "absent.toml"], "cannot read the hardware file absent.toml"),
        (["plan", str(DEMO), "--gpus", "8"], "--gpus requires --scaling or --search"),
        (["plan", str(DEMO), "--top", "8"], "--top requires --search"),
        (["plan", str(DEMO), "--search", "--roofline"], "--search and --roofline cannot be combined; legal: "
        "one of them"),
        (["plan", str(DEMO), "--search", "--gpus", "x"], "--gpus = x is not legal; legal: a whole number from"),
        (["plan", str(DEMO), "--search", "--gpus", "9" * 20], "is not legal; legal: a whole number from 1 to 65536"),
        (["plan", str(DEMO), "--search"], "a search needs a machine: give --hardware"),
        (["plan", str(DEMO), "grid.tp=3"], "grid.tp = 3 does not divide model.heads = 4; legal: 1, 2"),
        (["plan", str(DEMO), "plan.release=none-such", "--hardware", "H100"], "plan.release = none-such is not known"),
        (["plan", str(DEMO), "train.precision=fp8", "--hardware", "A100-80"], "train.precision = fp8 has no peak rate"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def test_the_plan_of_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(["plan", str(DEMO)], capsys)
    assert (
        code == 0 and "unknown without a machine" in text and "MiB by rank" in text and "ep 1.57 MB" in text
    )
    code, out, _ = run(["plan", str(DEMO), "--json"], capsys)
    tree = json.loads(out)
    assert tree["step_s"] is None and tree["memory"]["peak_bytes"] > 0 and tree["bytes"]["ep"] > 0
    for path in FRONTIER.glob("*.toml"):
        code, text, _ = run(["plan", str(path)], capsys)
        assert code == 0 and max(map(len, text.splitlines())) <= 80, text
    code, text, _ = run(["plan", str(FRONTIER / "llama2-70b.toml"), "knobs.micro_batches=4"], capsys)
    assert code == 1 and "does not fit: " in text
