"""The table of records that a rank may send, about itself or about the job. The hub and the relays use this table."""

from agents.protocol import Ack, Board, Gone, JobRecord, Previewed, RankStacks, Record, Summary

OfItself = Record | Board | Gone | Ack | RankStacks
"""These name their rank, which must be the sender."""

OfTheJob = JobRecord | Summary | Previewed
"""These describe all ranks; only rank 0 or the leader may send them."""
