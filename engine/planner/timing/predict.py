"""Predicts the time of a step, from the kernels of a GPU or, on measured CPU cores, from dispatched operations."""

from engine.planner.hardware.description import Hardware
from engine.planner.timing.on_cores import predict_on_cores
from engine.planner.timing.release import Release
from engine.planner.timing.release import release as known_release
from engine.planner.timing.step import Prediction, Step
from engine.planner.workload.job import Job


def predict(job: Job, hardware: Hardware, release: str | Release | None = None) -> Prediction:
    """The time of a step of `job`; `release`: a framework release or its name; None: the engine itself."""
    known = release if isinstance(release, Release) else known_release(release)
    if hardware.measured and hardware.measured.cores:
        return predict_on_cores(job, hardware, known)
    return Step(job, hardware, known).prediction()
