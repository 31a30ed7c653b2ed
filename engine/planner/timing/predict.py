"""Predicts the time of a training step. On CPU cores that `engine probe` measured, the prediction also counts the
operations that torch dispatches (`on_cores.py`). Also predicts the time of all collectives of a step by axis, whether
or not computation hides them."""

from engine.planner.hardware.description import Hardware
from engine.planner.timing.collectives import collective_time, dispatch_time
from engine.planner.timing.on_cores import predict_on_cores
from engine.planner.timing.release import Release
from engine.planner.timing.release import release as known_release
from engine.planner.timing.step import Prediction, Step
from engine.planner.workload.communication.exchanges import Exchange, rank_exchanges
from engine.planner.workload.job import Job


def predict(job: Job, hardware: Hardware, release: str | Release | None = None) -> Prediction:
    """The time of a step of `job`. `release` is a framework release or its name; None: the engine itself."""
    known = release if isinstance(release, Release) else known_release(release)
    if hardware.measured and hardware.measured.cores:
        return predict_on_cores(job, hardware, known)
    return Step(job, hardware, known).prediction()


def seconds_by_axis(job: Job, hardware: Hardware, pp: int, release: str | None = None) -> dict[str, float]:
    """For a rank at pipeline coordinate `pp`, the time per step that the collectives of each axis take, in seconds.
    This includes time that overlaps with computation, which `Prediction.phases` leaves out."""
    found: dict[str, float] = {}
    for one in rank_exchanges(job, pp, known_release(release).gradient_bytes):
        found[one.axis] = found.get(one.axis, 0.0) + one.times * _seconds(one, hardware)
    return found


def _seconds(one: Exchange, hardware: Hardware) -> float:
    """The time of an exchange, such as an all-gather of weights, in seconds. If an exchange is sent as several
    collectives (`pieces`), their times are added."""
    if one.copies > 1:
        return dispatch_time(one.bytes, one.copies, one.ranks, one.stride, hardware)
    return one.pieces * collective_time(one.kind, one.bytes / one.pieces, one.ranks, one.stride, hardware)
