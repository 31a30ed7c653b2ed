"""The planner's predictions for a run with its current knob values: exposed time, bytes and collectives by axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cockpit.data.store import Store
from cockpit.knobs.plan import run as runs
from cockpit.knobs.plan.worker import Answer, Worker


@dataclass(frozen=True)
class PlannedAxes:
    """Predictions by axis. `exposed_ms`: exposed time in the step of the slowest rank; empty if ranks share cores,
    or if no peak rate of the device is known. `bytes`: bytes that rank 0 sends in a step. `collectives`: number of
    collectives that a rank at pp coordinate 0 starts in a step.
    """

    exposed_ms: Mapping[str, float]
    bytes: Mapping[str, float]
    collectives: Mapping[str, int]


class AxesPlan:
    """Asks the planner to predict the exposed time, the bytes and the collectives of each axis of one run; a worker
    thread computes the predictions. The caller holds the store's lock."""

    def __init__(self, folder: Path | None) -> None:
        self.worker = Worker()
        self._folder = folder

    def ask(self, store: Store) -> PlannedAxes | str | None:
        """The predicted exposed time, bytes and collectives of each axis with the knob values in force, or a sentence
        that says why there is no prediction. None while the prediction is being computed, or until the run has sent its
        knobs and a rank has joined.
        """
        reported = runs.reported(store, self._folder)
        answer: Answer | None = self.worker.ask(reported, lambda: _planned(reported)) if reported else None
        if answer is None:
            return None
        found: PlannedAxes | str = answer.refusal or answer.value
        return found


def _planned(reported: runs.Reported) -> PlannedAxes:
    from engine.planner.roofline import collectives  # in the worker's thread, because this import takes long
    from engine.planner.timing.predict import predict
    from engine.planner.workload.communication.traffic import traffic
    from engine.planner.workload.job import Job

    basis = runs.basis(reported)
    job = Job.of(basis.layout)
    known = not reported.shared and job.precision in basis.hardware.device.peak
    phases = predict(job, basis.hardware, basis.layout.plan.release).phases if known else {}
    return PlannedAxes(
        {axis: 1e3 * seconds for axis, seconds in phases.items()}, traffic(job), dict(collectives(job))
    )
