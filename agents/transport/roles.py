"""Roles of peers (rank, viewer, operator): which messages each role may send to a hub.

Over ipc the role of a peer depends on the socket; over TCP it depends on the peer's key (`curve_keys`).
"""

import re
from enum import StrEnum

from msgspec import structs

from agents.protocol import (
    AnyMessage,
    Credit,
    Decide,
    Message,
    Preview,
    Propose,
    Sample,
    StackQuery,
    Try,
    Unknown,
    clip,
)


class Role(StrEnum):
    """A rank sends telemetry, a viewer watches the run, and an operator watches and changes the run."""

    RANK = "rank"
    VIEWER = "viewer"
    OPERATOR = "operator"


CHANGES = (Propose, Try, Decide)  # messages with a field `who`
ANSWERED = (Propose, Try, Preview, StackQuery)  # messages with an `id`, which the answer repeats
TRIAL_IDS = re.compile(r"\.(try|revert\d+)$")  # suffix of the ids of proposals that `trials` makes
MAY_SEND: dict[Role, tuple[type[Message], ...]] = {
    Role.VIEWER: (Credit, Preview, Sample),
    Role.OPERATOR: (Credit, Preview, Sample, StackQuery, *CHANGES),
}
"""Messages that a client may send. A rank may send all others; `Ingest` checks these."""


def refusal(role: Role | None, key: str, message: Message) -> str | None:
    """Why `role` does not allow `message`, in one sentence; None if it does. `key`: the name of the peer's key, or ""
    for a peer connected over ipc. If `role` is None, the key is revoked or no longer listed.
    """
    if role is None:
        return f"the key {key} is no longer in force; ask the owner of the run for another key"
    kind = message.kind if isinstance(message, Unknown) else type(message).__name__.lower()
    has = f"the key {key} has the role {role}" if key else "this connection only watches"
    if role is Role.RANK:
        if key and isinstance(message, MAY_SEND[Role.OPERATOR]):
            return f"{has}; watching requires the role viewer, changes require the role operator"
        return None
    if not isinstance(message, MAY_SEND[Role.OPERATOR]):
        if key:
            return f"{has}; sending a {kind} requires the role rank"
        return f"a client may send credit and proposals, but this message is a {kind}"
    if not isinstance(message, MAY_SEND[role]):
        what = "stacks show source code and" if isinstance(message, StackQuery) else "changes"
        return f"{has}; {what} require the role operator"
    if isinstance(message, Propose) and TRIAL_IDS.search(message.id):
        return f"the hub reserves ids like {message.id} for its trials; use another id"
    return None


def signed(key: str, message: AnyMessage) -> AnyMessage:
    """The message with the name of the key prepended to `who`, because a client can set `who` to anything."""
    if key and isinstance(message, CHANGES):
        return structs.replace(message, who=clip(f"{key}: {message.who}"))
    return message
