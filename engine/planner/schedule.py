"""Pipeline schedules as lists of actions, and a clock that runs them: the bubble a schedule cannot avoid.

An action is (kind, micro-batch), kind F or B. Stage s may run F of a micro-batch once stage s - 1 has, and B once
stage s + 1 has run B (the last stage: once it has run F itself).
"""

from collections.abc import Sequence

Act = tuple[str, int]


def order(name: str, stage: int, stages: int, micro_batches: int) -> list[Act]:
    """What `stage` runs, in order, under the schedule `name`: "gpipe" or "1f1b"."""
    forwards: list[Act] = [("F", n) for n in range(micro_batches)]
    backwards: list[Act] = [("B", n) for n in range(micro_batches)]
    if name == "gpipe":
        return forwards + backwards
    assert name == "1f1b", name
    warm_up = min(micro_batches, stages - stage)
    acts = forwards[:warm_up]
    for n, backward in enumerate(backwards):
        acts.append(backward)
        acts += forwards[warm_up + n : warm_up + n + 1]
    return acts


def bubble(name: str, micro_batches: int, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Mean share of the window in which a stage idles, 0..1, when a micro-batch takes stage s `forward[s]` and
    `backward[s]` (any unit) and nothing else costs time. The window ends when the last stage has finished.

    For balanced stages this is (p - 1) / (m + p - 1) (Narayanan et al. 2021).
    """
    stages = len(forward)
    cost = {"F": forward, "B": backward}
    queues = [order(name, stage, stages, micro_batches) for stage in range(stages)]
    clock = [0.0] * stages
    done: dict[tuple[int, str, int], float] = {}
    nexts = [0] * stages
    while any(n < len(queue) for n, queue in zip(nexts, queues, strict=True)):
        moved = False
        for stage in range(stages):
            while nexts[stage] < len(queues[stage]):
                kind, batch = queues[stage][nexts[stage]]
                ready = _ready(done, stage, kind, batch, stages)
                if ready is None:
                    break
                clock[stage] = max(clock[stage], ready) + cost[kind][stage]
                done[stage, kind, batch] = clock[stage]
                nexts[stage] += 1
                moved = True
        assert moved, f"the schedule {name} waits for itself"
    window = max(clock)
    busy = sum(micro_batches * (f + b) for f, b in zip(forward, backward, strict=True)) / stages
    return 1.0 - busy / window if window else 0.0


def _ready(
    done: dict[tuple[int, str, int], float], stage: int, kind: str, batch: int, stages: int
) -> float | None:
    """When the input of an action is there; None: not yet known."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get((stage - 1, "F", batch))
    return done.get((stage, "F", batch)) if stage == stages - 1 else done.get((stage + 1, "B", batch))
