"""MCP tools that change a run. The tools send the same requests as `cockpit set`, `try` and `undo`; the hub decides
whether this server may change the run, and writes each change to the log under the server's name.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from agents.protocol import MOST_TRIAL_STEPS
from agents.waiting import wait_for_command
from cockpit.cli.mcp.bounds import bounded
from cockpit.cli.mcp.changes import Changes, Knob, KnobValue, words_of
from cockpit.cli.mcp.reading import Wait, stamp, trial_outcome
from cockpit.cli.mcp.session import Session
from cockpit.cli.steer.steering import request, requested_changes
from cockpit.data import plain
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.knobs.values import TRIAL_STEPS

Reason = Annotated[str, Field(max_length=1000, description="why, for the log of the run")]
Steps = Annotated[int, Field(ge=4, le=MOST_TRIAL_STEPS)]
REFUSAL_S = 1.0  # time in which the hub refuses a decision about a trial


class ChangingTools:
    """The tools that change a run; an MCP client receives each method's docstring as the description of the tool."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def propose(self, changes: Changes, reason: Reason = "", wait_s: Wait = 45.0) -> dict[str, Any]:
        """Change knobs on all ranks or on none, and wait for the outcome. state: applied, rejected (see why), expired,
        or accepted if the ranks have not switched yet. Preview a change first."""
        return self._proposed(words_of(changes), reason, wait_s)

    def action(
        self,
        action: Literal["save", "pause", "resume", "stop"],
        reason: Reason = "",
        wait_s: Wait = 45.0,
    ) -> dict[str, Any]:
        """Save a checkpoint, pause or resume training, or end the run after the current step (`stop`)."""
        return self._proposed([action], reason, wait_s)

    def undo(self, reason: Reason = "", wait_s: Wait = 45.0) -> dict[str, Any]:
        """Revert the newest change that is still in force, whoever made it. The log names what an undo would revert."""

        def send(connection: Connection) -> str:
            return connection.client.undo(who=self._session.who, reason=reason)

        return self._settled([], send, wait_s)

    def try_change(
        self,
        knob: Knob,
        value: KnobValue,
        steps: Steps = TRIAL_STEPS,
        reason: Reason = "",
        wait_s: Wait = 45.0,
    ) -> dict[str, Any]:
        """Start a trial: measure some steps, change one knob, measure the same number of steps, and revert the knob
        unless the run is clearly faster. If the trial is not over after wait_s, it continues; the tool `trial` then
        waits for its outcome."""
        words = words_of({knob: value})
        with self._session.requesting(words) as connection:
            changes = requested_changes(connection, words)
            who = self._session.who
            id = request(lambda: connection.client.start_trial(changes, steps, who=who, reason=reason))
            return trial_outcome(connection, id, wait_s)

    def end_trial(self, keep: bool, wait_s: Wait = 45.0) -> dict[str, Any]:
        """End the running trial now: keep the new value, or revert it."""
        with self._session.requesting() as connection:
            running = [one.id for one in connection.client.state.trials.values() if not one.settled]
            if not running:
                raise CockpitError("no trial is running")
            connection.client.decide(running[0], keep, who=self._session.who)
            until = time.monotonic() + REFUSAL_S
            while time.monotonic() < until and not connection.client.state.trials[running[0]].settled:
                # Raises an error if the hub refuses the decision. Such a refusal has no id.
                connection.poll(0.05)
            return trial_outcome(connection, running[0], wait_s)

    def _proposed(self, words: list[str], reason: str, wait_s: float) -> dict[str, Any]:
        def send(connection: Connection) -> str:
            changes = requested_changes(connection, words)
            return connection.client.propose(changes, who=self._session.who, reason=reason)

        return self._settled(words, send, wait_s)

    def _settled(self, words: list[str], send: Callable[[Connection], str], wait_s: float) -> dict[str, Any]:
        """Call `send`, which sends a proposal, and return the proposal's outcome or, if it is still pending after
        `wait_s` seconds, its state."""
        with self._session.requesting(words) as connection:
            client = connection.client
            id = request(lambda: send(connection))
            pending = ""
            try:
                command = wait_for_command(client, id, wait_s)
            except TimeoutError as error:
                if id not in client.state.commands:
                    raise CockpitError(str(error)) from None
                command, pending = client.state.commands[id], str(error)
            if id in client.denied:
                raise CockpitError(client.denied[id])
            record = plain.outcome(command) | {"who": command.who, "changes": command.changes}
            return bounded(stamp(connection.store) | record | ({"pending": pending} if pending else {}))
