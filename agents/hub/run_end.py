"""Detects whether and why the ranks of a run have ended, and publishes the failure, if any, and the end of each
rank."""

import time
from pathlib import Path

from agents.hub.telemetry.alerting import Alerts
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event, Gone, clip
from agents.rundir.failure_file import last_failure
from agents.rundir.local_machine import process_start, process_state, this_machine


class RunEnd:
    """Determines whether and why the ranks of the run have ended; `publish` tells the clients. `parent`: the process
    that started this hub and ends with the run, if there is such a process.
    """

    def __init__(
        self,
        folder: Path,
        began_s: float,
        parent: int | None,
        membership: Membership,
        update_log: UpdateLog,
        alerts: Alerts,
    ) -> None:
        self._folder, self._began_s, self._parent = folder, began_s, parent
        self._parent_start = process_start(parent) if parent is not None else 0
        self._membership, self._update_log, self._alerts = membership, update_log, alerts

    @property
    def supervised(self) -> bool:
        """Whether a process supervises this hub, and ends it after the job."""
        return self._parent is not None

    @property
    def parent_ended(self) -> bool:
        return self._parent is not None and process_state(self._parent, self._parent_start) == "ended"

    def reason(self) -> str | None:
        """The reason why pending commands can no longer be applied: "" if it is unknown, None if the ranks may continue
        without this hub."""
        failure = last_failure(self._folder, self._began_s)
        leader = self._membership.leader
        if failure or leader is None:  # the leader left, is lost, or never connected
            return failure or ""
        if self.parent_ended:
            return f"process {self._parent}, which had started it, is gone"
        local = leader.machine == this_machine()
        if local and process_state(leader.pid, leader.process_start) == "ended":
            return f"the leader, rank {leader.rank}, is gone"
        return None

    def publish(self) -> None:
        """Publish the recorded failure, if any, and a `Gone` for each rank that has neither left cleanly nor is known
        to have ended. The exit of these ranks counts as clean if the leader has left cleanly and no failure was
        recorded.
        """
        state = self._update_log.state
        failure = last_failure(self._folder, self._began_s)
        if failure:
            self._update_log.publish(Event(time.time(), "error", "run", clip(failure)))
        leader = self._membership.last_leader
        goodbye = state.gone.get(leader) if leader is not None else None
        well = failure is None and goodbye is not None and goodbye.clean
        text = "" if well else clip(failure or "the run has ended without a goodbye")
        if failure or (text and state.hellos and self._parent is not None):
            self._alerts.run_failed(text)
        for rank in [rank for rank in state.hellos if not (rank in state.gone and state.gone[rank].over)]:
            self._update_log.publish(Gone(rank, clean=well, text=text, process="ended"))
