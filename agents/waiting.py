"""Waiting for what a client has asked for: until it is settled, or so many seconds."""

import time

from agents.client import WAIT_S, Client
from agents.wire import CommandState, Previewed, TrialState


def wait_for_command(client: Client, id: str, timeout_s: float, settled: bool = True) -> CommandState:
    """Poll until the proposal `id` is settled; with `settled=False`, until it is answered at all.

    TimeoutError says in one sentence how far it came. One that this client may not ask is rejected, as one that the
    run cannot take; but it is in nobody's log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        state = client.state.commands.get(id)
        if state is None and id in client.denied:
            return CommandState(id, 0, "rejected", {}, {}, "", time.time(), why=client.denied[id])
        if state and (state.settled or not settled):
            return state
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(_unsettled(client, state, timeout_s))
        client.poll(remaining)


def wait_for_trial(client: Client, id: str, timeout_s: float) -> TrialState:
    """Poll until the trial `id` is settled. TimeoutError says in one sentence how far it came; it goes on."""
    deadline = time.monotonic() + timeout_s
    while not ((trial := client.state.trials.get(id)) and trial.settled):
        if id in client.denied:
            raise TimeoutError(client.denied[id])
        if time.monotonic() >= deadline:
            how = f"the trial is at {trial.state}" if trial else client.refused or "the hub did not answer"
            raise TimeoutError(f"{how} after {timeout_s:g} s")
        client.poll(WAIT_S)
    return trial


def wait_for_preview(client: Client, id: str, timeout_s: float) -> Previewed:
    """Poll until the question `id` is answered; TimeoutError says in one sentence that it was not."""
    deadline = time.monotonic() + timeout_s
    while id not in client.previews:
        if id in client.denied:
            raise TimeoutError(client.denied[id])
        if time.monotonic() >= deadline:
            raise TimeoutError(client.refused or f"nobody said within {timeout_s:g} s what this would do")
        client.poll(0.05)
    return client.previews[id]


def _unsettled(client: Client, state: CommandState | None, timeout_s: float) -> str:
    if client.refused:
        return client.refused
    if client.age_s is None:
        return f"no hub answered at {client.endpoint} within {timeout_s:g} s"
    if state is None:
        return f"the hub did not answer the proposal within {timeout_s:g} s"
    if state.state == "accepted":
        return f"revision {state.revision} was accepted and no rank has applied it within {timeout_s:g} s"
    reached = f"{state.state} on {state.acks} of {state.world} ranks"
    return f"revision {state.revision} is {reached} after {timeout_s:g} s"
