"""Checks whether a proposed knob change is legal in the current state of the run, and builds the command from it."""

import time
from collections.abc import Sequence

from msgspec import structs

from agents.hub.commands.issue import illegal
from agents.protocol import MOVED_ON, PENDING_CHANGE, Changes, CommandState, Hello, Propose, clip
from agents.state.run_state import RunState
from agents.state.undo import newest_undoable

WAITING = 64  # maximum number of pending proposals
# An operation of the leader that lasts longer is reported as the reason for a wait.
LONG_OPERATION_MS = 1500.0
WAITS_FOR_RANKS = "it waits for the ranks, which have not sent their knobs yet"


def refusal(
    propose: Propose,
    state: RunState,
    leader: Hello | None,
    under_way: Sequence[CommandState],
    revision: int,
) -> str | None:
    """Why a proposal is rejected; None if it is legal. `revision`: the current revision of the knobs; `under_way`:
    accepted commands without a final result.
    """
    board = state.board
    if board and leader is None:
        return f"the leader, rank {board.rank}, is gone; without it no knob can be changed"
    if not propose.changes:
        return "the proposal contains no change"
    knobs = {knob.name: knob for knob in board.knobs} if board else {}
    for name in propose.changes:
        if board and name not in knobs:
            return f"there is no knob {name}; the knobs are {', '.join(knobs)}"
    if len(under_way) >= WAITING:
        return f"{WAITING} changes are already pending; try again when they are settled"
    if propose.base_revision is not None:
        if propose.base_revision != revision:
            return f"{MOVED_ON}: revision {revision}, not {propose.base_revision}"
        if under_way:
            first = under_way[0]
            return f"{PENDING_CHANGE} {revision} is pending, by {first.who or 'someone'}"
    step = step_of(state, leader.rank) if leader else 0
    if propose.expires_step is not None and propose.expires_step < step:
        return f"step {propose.expires_step} has passed; the run is at step {step}"
    # Whether a change is legal depends on the whole resulting board, so the final check is made by the ranks. The
    # leader's board lists only the legal values for one change to the current values. The ranks also check proposals
    # made before they connected.
    if len(propose.changes) == 1 and board:
        return illegal(propose.changes, knobs)
    return None


def undo_proposal(propose: Propose, run: RunState, revision: int) -> tuple[Propose, int, str | None]:
    """Returns the proposal that undoes the newest change, the revision of this change, and the reason if no change can
    be undone.

    `revision`: the current revision of the knobs.
    """
    found = newest_undoable(run.commands.values())
    if run.board is None:
        return propose, 0, "no rank has sent its knobs yet; try again when the run has started"
    if found is None:
        return propose, 0, "there is no change to undo"
    base = revision if propose.base_revision is None else propose.base_revision
    undoing = structs.replace(propose, changes=found.before, base_revision=base)
    return undoing, found.revision, None


def new_command(
    propose: Propose, run: RunState, world: int, revision: int = 0, why: str = "", undoes: int = 0
) -> CommandState:
    """The initial state of a command: accepted, with its revision, or rejected if `revision` is 0."""
    now = time.time()
    return CommandState(
        id=propose.id,
        revision=revision,
        state="accepted" if revision else "rejected",
        changes=propose.changes,
        before=values_in_force(run, propose.changes),
        who=propose.who,
        time_s=now,
        world=world,
        why=clip(why),
        reason=propose.reason,
        asked_s=now,
        undoes=undoes,
    )


def step_of(state: RunState, leader: int) -> int:
    """The newest step that appears in the summaries or in the leader's own records."""
    summary = state.summaries[-1].step if state.summaries else 0
    return max([summary, *(known[leader].step for known in (state.steps, state.pulses) if leader in known)])


def values_in_force(state: RunState, changes: Changes) -> Changes:
    """The current values of the knobs in `changes`; actions have no value."""
    board = state.board
    return {k.name: k.value for k in board.knobs if k.name in changes and not k.action} if board else {}


def wait_reason(state: RunState, leader: Hello | None) -> str:
    """Why a command must wait: the ranks or the leader do not answer, or a long operation delays the next step
    boundary. "" if the ranks train normally.
    """
    if state.board is None:
        return WAITS_FOR_RANKS
    if leader is None:
        return f"it waits for the leader, rank {state.board.rank}, which does not answer"
    pulse = state.pulses.get(leader.rank)
    if pulse is None or pulse.since_ms < LONG_OPERATION_MS:
        return ""
    return clip(f"it waits for a step to end: rank {leader.rank} is in {pulse.doing[:200]}")
