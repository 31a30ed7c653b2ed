"""The text that panels about experts show while the load per expert is unknown."""

from collections.abc import Iterator

from agents.alerts.training import COLLAPSE, DROPPED
from agents.protocol import LoadSummary
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.history.experts import HOT
from cockpit.data.store import Store
from cockpit.tui.drawing.guide import Guide, guide_lines
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

GUIDE = Guide(
    "This screen shows the load of each expert of each layer of a Mixture of Experts: dead and hot experts, dropped "
    "tokens, and how evenly the router spreads the tokens.",
    (
        ("this run", "1 Overview, 3 Pipeline and 6 Curves show it"),
        (
            "engine run",
            "a layout with experts, such as layouts/demo.toml: [model.moe] experts = 8, top_k = 2",
        ),
        ("your own loop", "step.report_experts(loads) on rank 0: for each layer, the tokens of each expert"),
    ),
)


def no_experts(store: Store) -> bool:
    """Whether the run has no experts; False until the first step is done."""
    known = store.fact("experts") or store.state.loads or len(store.expert_history.loads)
    return store.summary is not None and not known


def guide(store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
    """The lines that the experts screen shows for a run without experts."""
    return guide_lines(_none(store), GUIDE, width, height, colours)


def _none(store: Store) -> str:
    return "no experts in this model" if store.fact("experts") == 0 else "this run reports no experts"


def why_empty(store: Store, colours: Palette, step: int | None = None) -> list[StripLine]:
    """A line that says why no loads per expert are shown. If the run has reported only a summary of each layer (its
    most loaded experts and the number of idle ones), a table of these summaries follows."""
    loads = store.state.loads
    if loads and loads.layers and not len(store.expert_history.loads):
        text = f"no sample of all loads yet; the summary of step {format.grouped(loads.step)}:"
        lines = [StripLine().add(f"{format.MISSING} {text}", colours.faint)]
        return lines + list(_summaries(loads.layers, colours))
    if len(store.expert_history.loads):
        text = f"step {format.grouped(step)} is not kept, nor is an earlier one"
    else:
        text = "no expert layer has reported yet" if store.fact("experts") else _none(store)
    return [StripLine().add(f"{format.MISSING} {text}", colours.faint)]


def _summaries(layers: list[LoadSummary], colours: Palette) -> Iterator[StripLine]:
    """One line per layer, starting with the layer that has the most uneven load."""
    yield StripLine().add("layer    most   even    idle     drop   most loaded", colours.dim)
    warn, text = colours.level[Level.WARN], colours.text
    for one in sorted(layers, key=lambda one: one.entropy):
        drop = one.dropped / one.pairs if one.pairs else None
        top = " · ".join(f"expert {top.expert} {100 * top.share:.1f} %" for top in one.top)
        line = StripLine().add(f"L{one.layer}".ljust(6), text)
        line.add(f"{format.fixed(one.max_over_mean, 6, 2)}×", warn if one.max_over_mean >= HOT else text)
        line.add(format.fixed(one.entropy, 7, 2), warn if one.entropy < COLLAPSE else text)
        line.add(f"{one.idle:>8}", warn if one.idle else text)
        line.add(format.percent(drop, 7), warn if drop and drop >= DROPPED else text)
        yield line.add(f"   {top}", colours.dim)
