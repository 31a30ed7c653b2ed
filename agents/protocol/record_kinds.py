"""Lists the message types that are records: of each type, a newer message replaces the older one of the same rank or,
if it describes the whole job, the older one. The run's state, the update log, the recording and the relay use these
lists.
"""

from typing import Final, get_args

from agents.protocol.measurements import Loads, Vitals
from agents.protocol.records import Experts, Peers, Pulse, Step, Timeline

Record = Step | Pulse | Vitals | Timeline | Peers
"""Records that each rank sends repeatedly; only the newest of each rank and kind is kept."""

JobRecord = Loads | Experts
"""Records that describe all ranks; only the newest of each kind is kept."""

RECORDS: Final[tuple[type[Record], ...]] = get_args(Record)
JOB_RECORDS: Final[tuple[type[JobRecord], ...]] = get_args(JobRecord)
