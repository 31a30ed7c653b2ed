"""Detectors for the training itself: loss, gradient norm, expert load, dropped tokens."""

import math
from collections import deque
from collections.abc import Iterator, Sequence

from agents.alerts.finding import RANKS_NAMED, Finding, NewSummaries, median, names_of, spread
from agents.protocol import LayerLoad, LoadSummary, Summary, Value
from agents.state.run_state import RunState

RECENT = 32  # steps in the baseline
ENOUGH = 8
LOSS_SPIKE_SPREADS = 8.0  # a loss is a spike if it exceeds the median by this many standard deviations
LOSS_SPIKE = 0.2  # a spike also exceeds the median by at least this fraction of it
GRADIENT_SPIKE = 10.0  # a gradient norm is a spike if it exceeds this many times the median

DEAD = 0.01  # an expert is dead if its load is below this fraction of an equal share ...
DEAD_SAMPLES = 3  # ... in this many consecutive samples ...
DEAD_STEPS = 8  # ... that span at least this many steps
# Fractions of the entropy of an even load: below the first a router has collapsed, above the second it has recovered.
COLLAPSE, COLLAPSE_RELEASE = 0.5, 0.55
# Shares of dropped pairs among the routed pairs above which the alert is raised, and below which it ends.
DROPPED, DROPPED_RELEASE = 0.05, 0.025


class Loss:
    """Detects a loss or gradient norm that is not finite or far above its recent median. A spike lasts until the value
    is back in the normal range. A gradient that overflows in fp16 raises no alert.
    """

    holds, releases = 1, 2

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._new = NewSummaries()

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        new = self._new.take(state.summaries)
        if self._new.restarted:
            self._losses.clear()
            self._norms.clear()
        findings = [finding for summary in new for finding in self._judge(state, summary)]
        if new and not any(finding.name == "nan" for finding in findings):
            findings += self._own_records(state)
        last_of_each = {(finding.name, finding.subject): finding for finding in findings}
        return list(last_of_each.values()) if new else None

    def _own_records(self, state: RunState) -> Iterator[Finding]:
        """A loss or gradient norm in the ranks' newest records that is not finite. If the ranks do not exchange their
        measurements, the summary has only those of rank 0."""
        known = (one for one in state.steps.values() if one.loss is not None or one.grad_norm is not None)
        broken = {
            one.rank: one
            for one in known
            if (_is_broken(one.loss) or _is_broken(one.grad_norm)) and one.rank not in state.gone
        }
        if broken:
            first = broken[min(broken)]
            yield _not_finite(state, first.step, first.loss, first.grad_norm, sorted(broken))

    def _judge(self, state: RunState, summary: Summary) -> Iterator[Finding]:
        step, loss, norm = summary.step, summary.loss, summary.grad_norm
        if summary.skipped and summary.loss_scale is not None and not _is_broken(loss):
            return  # with fp16 an overflow is normal; the engine reports it as a warning
        if _is_broken(loss) or _is_broken(norm):
            kept = "; the weights were not updated" if summary.skipped else ""
            yield _not_finite(state, step, loss, norm, summary.not_finite, kept)
            return
        if loss is not None:
            yield from self._loss_spike(step, loss)
        if norm is not None:
            yield from self._gradient_spike(step, norm)

    def _loss_spike(self, step: int, loss: float) -> Iterator[Finding]:
        usual = median(self._losses)
        enough = len(self._losses) >= ENOUGH
        far = enough and loss > usual + max(
            LOSS_SPIKE * abs(usual), LOSS_SPIKE_SPREADS * spread(list(self._losses), usual)
        )
        if far:
            text = f"loss {loss:.3f} at step {step} is far above the usual {usual:.3f}"
            yield Finding("loss_spike", "run", "warning", text, {"step": step, "loss": loss, "usual": usual})
        else:
            self._losses.append(loss)  # spikes are not added to the baseline

    def _gradient_spike(self, step: int, norm: float) -> Iterator[Finding]:
        usual = median(self._norms)
        if len(self._norms) >= ENOUGH and usual > 0 and norm > GRADIENT_SPIKE * usual:
            text = (
                f"gradient norm {norm:.3g} at step {step} is {norm / usual:.0f} times the usual {usual:.3g}"
            )
            yield Finding(
                "gradient_spike", "run", "warning", text, {"step": step, "norm": norm, "usual": usual}
            )
        else:
            self._norms.append(norm)


def _not_finite(
    state: RunState, step: int, loss: float | None, norm: float | None, ranks: Sequence[int], kept: str = ""
) -> Finding:
    """The finding for a loss or gradient norm that is not finite. `ranks`: those with such a value; they are named
    unless all ranks have one, as after the first update with a NaN."""
    what = f"loss is {loss}" if _is_broken(loss) else f"gradient norm is {norm}"
    where = f" on {names_of(state, ranks)}" if ranks and len(ranks) < min(state.world, RANKS_NAMED) else ""
    evidence: dict[str, Value] = {"step": step, "loss": repr(loss), "grad_norm": repr(norm)}
    text = f"{what} at step {step}{where}{kept}"
    return Finding("nan", "run", "error", text, evidence, tuple(ranks) if where else ())


def _is_broken(value: float | None) -> bool:
    """Whether the value is NaN or infinite; false for a missing value."""
    return value is not None and not math.isfinite(value)


# Maximum number of layers or experts listed in an alert, worst first; the alert also states the total number.
LAYERS_NAMED = 4


class DeadExperts:
    """Detects experts that receive almost no tokens; returns one finding for all layers. Loads are sampled, so two
    samples may be many steps apart."""

    holds, releases = 1, 2

    def __init__(self) -> None:
        # layer -> expert -> steps of the consecutive samples with almost no load
        self._starved: dict[int, dict[int, list[int]]] = {}
        self._last = -1

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        experts = state.experts
        if experts is None or experts.step == self._last:
            return None
        self._last = experts.step
        dead = {
            layer.layer: starved
            for layer in experts.layers
            if len(layer.load) > 1 and any(layer.load) and (starved := self._dead(layer, experts.step))
        }
        if not dead:
            return []
        of = {layer.layer: len(layer.load) for layer in experts.layers}
        worst = sorted(dead, key=lambda layer: (-len(dead[layer]) / of[layer], layer))
        many = sum(map(len, dead.values()))
        subject = f"{many} expert{'' if many == 1 else 's'} in {len(dead)} of {len(of)} layers"
        text = (
            f"{subject} had under {100 * DEAD:.0f} % of an even share in each of the last samples: "
            f"{_layers([f'layer {layer}: {_experts(dead[layer])} of {of[layer]}' for layer in worst])}"
        )
        evidence: dict[str, Value] = {"dead": many, "experts": sum(of.values()), "layers": len(dead)}
        return [Finding("dead_experts", "run", "warning", text, evidence)]

    def _dead(self, layer: LayerLoad, step: int) -> list[int]:
        share = sum(layer.load) / len(layer.load)
        before = self._starved.get(layer.layer, {})
        starved = {
            expert: [*before.get(expert, [])[-DEAD_STEPS:], step]
            for expert, load in enumerate(layer.load)
            if load < DEAD * share
        }
        self._starved[layer.layer] = starved
        return [
            expert
            for expert, steps in starved.items()
            if len(steps) >= DEAD_SAMPLES and step - steps[0] >= DEAD_STEPS
        ]


def _experts(dead: list[int]) -> str:
    """Text such as ``expert 7`` or ``experts 1, 3``; if there are more than `LAYERS_NAMED`, only the number of
    experts."""
    if len(dead) > LAYERS_NAMED:
        return f"{len(dead)} experts"
    return f"expert{'' if len(dead) == 1 else 's'} {', '.join(map(str, dead))}"


def _layers(parts: list[str]) -> str:
    left = len(parts) - LAYERS_NAMED
    more = [f"and {left} more layer{'s' * (left != 1)}"] if left > 0 else []
    return ", ".join([*parts[:LAYERS_NAMED], *more])


class Routing:
    """Detects layers whose router sends most tokens to a few experts, and layers that drop tokens because experts are
    at capacity. Returns at most one finding of each kind, which covers all layers.
    """

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._last = -1
        self._collapsed: set[int] = set()
        self._dropping: set[int] = set()

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        loads = state.loads
        if loads is None or loads.step == self._last:
            return None
        self._last = loads.step
        layers = [layer for layer in loads.layers if layer.pairs]
        return [*self._collapse(layers), *self._drops(layers)]

    def _collapse(self, layers: list[LoadSummary]) -> Iterator[Finding]:
        self._collapsed = {
            layer.layer
            for layer in layers
            if layer.entropy < (COLLAPSE_RELEASE if layer.layer in self._collapsed else COLLAPSE)
        }
        worst = sorted(
            (layer for layer in layers if layer.layer in self._collapsed), key=lambda layer: layer.entropy
        )
        if not worst:
            return
        first = worst[0]
        top = (
            f": expert {first.top[0].expert} gets {100 * first.top[0].share:.0f} % of the tokens"
            if first.top
            else ""
        )
        text = f"the router of layer {first.layer} collapses{top}, evenness {first.entropy:.2f} of 1"
        if len(worst) > 1:
            others = [f"layer {layer.layer} {layer.entropy:.2f}" for layer in worst[1:]]
            text += f"; also in {len(others)} more of {len(layers)} layers: {_layers(others)}"
        evidence: dict[str, Value] = {
            "evenness": round(first.entropy, 3),
            "idle": first.idle,
            "layers": len(worst),
        }
        yield Finding("collapse", "run", "error", text, evidence)

    def _drops(self, layers: list[LoadSummary]) -> Iterator[Finding]:
        share = {layer.layer: layer.dropped / layer.pairs for layer in layers}
        self._dropping = {
            layer
            for layer, share_of_layer in share.items()
            if share_of_layer > (DROPPED_RELEASE if layer in self._dropping else DROPPED)
        }
        if not self._dropping:
            return
        worst = sorted(self._dropping, key=lambda layer: (-share[layer], layer))
        if len(worst) == 1:
            text = f"layer {worst[0]} drops {100 * share[worst[0]]:.1f} % of its tokens at this capacity"
        else:
            parts = _layers([f"layer {layer} {100 * share[layer]:.1f} %" for layer in worst])
            text = f"{len(worst)} of {len(layers)} layers drop tokens at this capacity: {parts}"
        evidence: dict[str, Value] = {"share": round(share[worst[0]], 4), "layers": len(worst)}
        yield Finding("drops", "run", "warning", text, evidence)
