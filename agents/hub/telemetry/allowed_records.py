"""The types of records that a rank may send about itself or about the job. The hub and the relays use these types to
check which rank may send a message."""

from agents.protocol import Ack, Board, Gone, JobRecord, Previewed, RankStacks, Record, Summary

OfItself = Record | Board | Gone | Ack | RankStacks
"""Records that a rank may send about itself. Each has the field `rank`, which must name the sender."""

OfTheJob = JobRecord | Summary | Previewed
"""Records about all ranks. Only rank 0 or the leader may send them."""
