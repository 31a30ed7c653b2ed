"""The training itself: loss and gradient, experts, drops."""

import math
from collections import deque
from collections.abc import Iterator

from agents.detect.finding import Finding, NewSummaries, median, spread
from agents.state import RunState
from agents.wire import LayerLoad, LoadSummary, Summary, Value

RECENT = 32  # steps that say what is usual
ENOUGH = 8
SPIKE_SPREADS = 8.0  # above the usual loss,
SPIKE = 0.2  # and by so much of it
BURST = 10.0  # times the usual gradient norm

DEAD = 0.01  # of its equal share
DEAD_SAMPLES = 3  # of its load, running,
DEAD_STEPS = 8  # over so many steps at least
COLLAPSE = 0.5  # of the entropy that an even load has
DROPPED, DROPPED_STILL = 0.05, 0.025  # of the routed pairs: raised, and held on to


class Loss:
    """Not finite, or far above what was usual. A spike is an alert as long as the loss has not come back."""

    holds, releases = 1, 2

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._new = NewSummaries()

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        new = self._new.take(state.summaries)
        if self._new.again:
            self._losses.clear()
            self._norms.clear()
        findings = [finding for summary in new for finding in self._judge(summary)]
        last_of_each = {(finding.name, finding.subject): finding for finding in findings}
        return list(last_of_each.values()) if new else None

    def _judge(self, summary: Summary) -> Iterator[Finding]:
        step, loss, norm = summary.step, summary.loss, summary.grad_norm
        if _broken(loss) or _broken(norm):
            what = f"loss is {loss}" if _broken(loss) else f"gradient norm is {norm}"
            kept = "; the weights were left as they were" if summary.skipped else ""
            text = f"{what} at step {step}{kept}"
            yield Finding(
                "nan", "run", "error", text, {"step": step, "loss": repr(loss), "grad_norm": repr(norm)}
            )
            return
        if loss is not None:
            yield from self._spike(step, loss)
        if norm is not None:
            yield from self._burst(step, norm)

    def _spike(self, step: int, loss: float) -> Iterator[Finding]:
        usual = median(self._losses)
        enough = len(self._losses) >= ENOUGH
        far = enough and loss > usual + max(
            SPIKE * abs(usual), SPIKE_SPREADS * spread(list(self._losses), usual)
        )
        if far:
            text = f"loss {loss:.3f} at step {step} is far above the usual {usual:.3f}"
            yield Finding("loss_spike", "run", "warning", text, {"step": step, "loss": loss, "usual": usual})
        else:
            self._losses.append(loss)  # what is far off must not become what is usual

    def _burst(self, step: int, norm: float) -> Iterator[Finding]:
        usual = median(self._norms)
        if len(self._norms) >= ENOUGH and usual > 0 and norm > BURST * usual:
            text = (
                f"gradient norm {norm:.3g} at step {step} is {norm / usual:.0f} times the usual {usual:.3g}"
            )
            yield Finding(
                "gradient_spike", "run", "warning", text, {"step": step, "norm": norm, "usual": usual}
            )
        else:
            self._norms.append(norm)


def _broken(value: float | None) -> bool:
    """No data is not broken data."""
    return value is not None and not math.isfinite(value)


class DeadExperts:
    """Experts that get next to nothing. Their loads come sampled, so that two samples may be many steps apart."""

    holds, releases = 1, 1

    def __init__(self) -> None:
        self._starved: dict[
            int, dict[int, list[int]]
        ] = {}  # layer -> expert -> steps of the samples, running
        self._last = -1

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        experts = state.experts
        if experts is None or experts.step == self._last:
            return None
        self._last = experts.step
        return [
            finding
            for layer in experts.layers
            if len(layer.load) > 1 and any(layer.load)
            for finding in self._dead(layer, experts.step)
        ]

    def _dead(self, layer: LayerLoad, step: int) -> Iterator[Finding]:
        share = sum(layer.load) / len(layer.load)
        before = self._starved.get(layer.layer, {})
        starved = {
            expert: [*before.get(expert, [])[-DEAD_STEPS:], step]
            for expert, load in enumerate(layer.load)
            if load < DEAD * share
        }
        self._starved[layer.layer] = starved
        dead = {
            expert: steps
            for expert, steps in starved.items()
            if len(steps) >= DEAD_SAMPLES and step - steps[0] >= DEAD_STEPS
        }
        if dead:
            named = ", ".join(map(str, list(dead)[:8])) + (
                f" and {len(dead) - 8} more" if len(dead) > 8 else ""
            )
            one = len(dead) == 1
            text = (
                f"expert{'' if one else 's'} {named} of layer {layer.layer} {'has' if one else 'have'} had under "
                f"{DEAD:.0%} of an even share in each of the last samples, {min(map(len, dead.values()))} or more"
            )
            evidence: dict[str, Value] = {"dead": len(dead), "experts": len(layer.load)}
            yield Finding("dead_experts", f"layer {layer.layer}", "warning", text, evidence)


class Routing:
    """Layers whose router sends nearly all to a few, or whose capacity turns tokens away: of every step's summary."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._last = -1
        self._dropping: set[int] = set()

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        loads = state.loads
        if loads is None or loads.step == self._last:
            return None
        self._last = loads.step
        return [
            finding
            for layer in loads.layers
            if layer.pairs
            for finding in (*_collapse(layer), *self._drops(layer))
        ]

    def _drops(self, layer: LoadSummary) -> Iterator[Finding]:
        share = layer.dropped / layer.pairs
        if share <= (DROPPED_STILL if layer.layer in self._dropping else DROPPED):
            self._dropping.discard(layer.layer)
            return
        self._dropping.add(layer.layer)
        text = f"layer {layer.layer} drops {share:.1%} of its tokens at this capacity"
        yield Finding("drops", f"layer {layer.layer}", "warning", text, {"share": round(share, 4)})


def _collapse(layer: LoadSummary) -> Iterator[Finding]:
    if layer.entropy >= COLLAPSE:
        return
    top = f": expert {layer.top[0].expert} gets {layer.top[0].share:.0%} of the tokens" if layer.top else ""
    text = f"the router of layer {layer.layer} collapses{top}, evenness {layer.entropy:.2f} of 1"
    evidence: dict[str, Value] = {"evenness": round(layer.entropy, 3), "idle": layer.idle}
    yield Finding("collapse", f"layer {layer.layer}", "error", text, evidence)
