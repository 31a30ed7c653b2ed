"""Which records a rank may send, for itself or for the job: one table for hub and relays."""

from agents.protocol import Ack, Board, Gone, JobRecord, Previewed, Record, Summary

OfItself = Record | Board | Gone | Ack
"""These name their rank, which must be the sender."""

OfTheJob = JobRecord | Summary | Previewed
"""These describe all ranks; only rank 0 or the leader may send them."""
