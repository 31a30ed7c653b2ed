"""The training itself: loss and gradient, experts, drops."""

import math
from collections import deque
from collections.abc import Iterator

from agents.alerts.finding import Finding, NewSummaries, median, spread
from agents.protocol import LayerLoad, LoadSummary, Summary, Value
from agents.state.run_state import RunState

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


NAMED = 4  # layers, or experts, in an alert, the gravest first; the text says how many there are


class DeadExperts:
    """Experts that get next to nothing, of all layers in one finding. Their loads come sampled, so that two samples may
    be many steps apart."""

    holds, releases = 1, 2

    def __init__(self) -> None:
        # layer -> expert -> steps of the samples, running
        self._starved: dict[int, dict[int, list[int]]] = {}
        self._last = -1

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        experts = state.experts
        if experts is None or experts.step == self._last:
            return None
        self._last = experts.step
        dead = {
            layer.layer: its
            for layer in experts.layers
            if len(layer.load) > 1 and any(layer.load) and (its := self._dead(layer, experts.step))
        }
        if not dead:
            return []
        of = {layer.layer: len(layer.load) for layer in experts.layers}
        worst = sorted(dead, key=lambda layer: (-len(dead[layer]) / of[layer], layer))
        many = sum(map(len, dead.values()))
        subject = f"{many} expert{'' if many == 1 else 's'} in {len(dead)} of {len(of)} layers"
        text = (
            f"{subject} had under {DEAD:.0%} of an even share in each of the last samples: "
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
    """``expert 7``, ``experts 1, 3``, or how many."""
    if len(dead) > NAMED:
        return f"{len(dead)} experts"
    return f"expert{'' if len(dead) == 1 else 's'} {', '.join(map(str, dead))}"


def _layers(said: list[str]) -> str:
    more = [f"and {len(said) - NAMED} more layers"] if len(said) > NAMED else []
    return ", ".join([*said[:NAMED], *more])


class Routing:
    """Layers whose router sends nearly all to a few, and layers whose capacity turns tokens away: of every step's
    summary, and one finding each for all layers."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._last = -1
        self._dropping: set[int] = set()

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        loads = state.loads
        if loads is None or loads.step == self._last:
            return None
        self._last = loads.step
        layers = [layer for layer in loads.layers if layer.pairs]
        return [*_collapse(layers), *self._drops(layers)]

    def _drops(self, layers: list[LoadSummary]) -> Iterator[Finding]:
        share = {layer.layer: layer.dropped / layer.pairs for layer in layers}
        self._dropping = {
            layer
            for layer, its in share.items()
            if its > (DROPPED_STILL if layer in self._dropping else DROPPED)
        }
        if not self._dropping:
            return
        worst = sorted(self._dropping, key=lambda layer: (-share[layer], layer))
        if len(worst) == 1:
            text = f"layer {worst[0]} drops {share[worst[0]]:.1%} of its tokens at this capacity"
        else:
            said = _layers([f"layer {layer} {share[layer]:.1%}" for layer in worst])
            text = f"{len(worst)} of {len(layers)} layers drop tokens at this capacity: {said}"
        evidence: dict[str, Value] = {"share": round(share[worst[0]], 4), "layers": len(worst)}
        yield Finding("drops", "run", "warning", text, evidence)


def _collapse(layers: list[LoadSummary]) -> Iterator[Finding]:
    worst = sorted((layer for layer in layers if layer.entropy < COLLAPSE), key=lambda layer: layer.entropy)
    if not worst:
        return
    first = worst[0]
    top = f": expert {first.top[0].expert} gets {first.top[0].share:.0%} of the tokens" if first.top else ""
    text = f"the router of layer {first.layer} collapses{top}, evenness {first.entropy:.2f} of 1"
    if len(worst) > 1:
        others = [f"layer {layer.layer} {layer.entropy:.2f}" for layer in worst[1:]]
        text += f"; so do those of {len(others)} more of {len(layers)} layers: {_layers(others)}"
    evidence: dict[str, Value] = {
        "evenness": round(first.entropy, 3),
        "idle": first.idle,
        "layers": len(worst),
    }
    yield Finding("collapse", "run", "error", text, evidence)
