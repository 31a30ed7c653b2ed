"""Lists the message types that are records. A newer record replaces the older one of the same type and, unless it
describes the whole job, of the same rank. The run's state, the update log, the recording and the relay use these lists.
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
