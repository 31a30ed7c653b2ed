"""Which records a rank may send, for itself or for the job: one table for hub and relays."""

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

# Records that name their rank, which must be the sender.
OF_ITSELF = (Step, Pulse, Vitals, Timeline, Peers, Board, Gone, Ack)
OF_THE_JOB = (
    Summary,
    Experts,
    Loads,
    Previewed,
)  # describe all ranks; only rank 0 or the leader may send them
