"""What ranks may say, and of whom: one table for the hub and for relays."""

from agents.protocol import (
    Ack,
    Board,
    Experts,
    Gone,
    Loads,
    Peers,
    Previewed,
    Pulse,
    Step,
    Summary,
    Timeline,
    Vitals,
)

# Those that name their rank, which must be the speaker's.
OF_ITSELF = (Step, Pulse, Vitals, Timeline, Peers, Board, Gone, Ack)
OF_THE_JOB = (Summary, Experts, Loads, Previewed)  # speak for all ranks, and only rank 0 or the leader may
