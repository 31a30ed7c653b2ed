"""The messages that ranks, relays, the hub and clients send to each other. Messages are typed, versioned, and encoded
as msgpack without extension types.

A frame is one msgpack value ``[version, [message, ...]]``. A message is an array ``[kind, field, ...]`` (an array-like
Struct of msgspec): a newer peer may append fields, and an older peer ignores these fields. A batch of messages is sent
as one frame, never as a ZeroMQ multipart message. `codec.decode` reads every frame: it checks size, version and types
before any field is used.

Units: a field whose name ends in ``_ms`` is in milliseconds, ``bytes`` counts bytes sent to other ranks, and a point in
time whose name ends in ``_s`` is in seconds since 1970 (UTC). ``None`` means "no data", which is never the same as
zero.
"""

from agents.protocol.base import FRAME_BYTES as FRAME_BYTES
from agents.protocol.base import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from agents.protocol.base import MESSAGE_BYTES as MESSAGE_BYTES
from agents.protocol.base import TEXT as TEXT
from agents.protocol.base import VERSION as VERSION
from agents.protocol.base import Changes as Changes
from agents.protocol.base import Coords as Coords
from agents.protocol.base import Count as Count
from agents.protocol.base import Facts as Facts
from agents.protocol.base import FiniteValue as FiniteValue
from agents.protocol.base import Message as Message
from agents.protocol.base import Name as Name
from agents.protocol.base import Parts as Parts
from agents.protocol.base import Phases as Phases
from agents.protocol.base import Rank as Rank
from agents.protocol.base import Real as Real
from agents.protocol.base import Revision as Revision
from agents.protocol.base import Text as Text
from agents.protocol.base import Unknown as Unknown
from agents.protocol.base import Value as Value
from agents.protocol.base import WireError as WireError
from agents.protocol.base import clean as clean
from agents.protocol.base import clip as clip
from agents.protocol.base import spell as spell
from agents.protocol.commands import MOST_TRIAL_STEPS as MOST_TRIAL_STEPS
from agents.protocol.commands import MOVED_ON as MOVED_ON
from agents.protocol.commands import PAUSED as PAUSED
from agents.protocol.commands import PENDING_CHANGE as PENDING_CHANGE
from agents.protocol.commands import PREVIEWS as PREVIEWS
from agents.protocol.commands import Ack as Ack
from agents.protocol.commands import Command as Command
from agents.protocol.commands import CommandState as CommandState
from agents.protocol.commands import Decide as Decide
from agents.protocol.commands import Estimate as Estimate
from agents.protocol.commands import Preview as Preview
from agents.protocol.commands import Previewed as Previewed
from agents.protocol.commands import Propose as Propose
from agents.protocol.commands import TrialState as TrialState
from agents.protocol.commands import Try as Try
from agents.protocol.connection import AnyMessage as AnyMessage
from agents.protocol.connection import Control as Control
from agents.protocol.connection import Credit as Credit
from agents.protocol.connection import Farewell as Farewell
from agents.protocol.connection import Refused as Refused
from agents.protocol.connection import Relay as Relay
from agents.protocol.connection import Update as Update
from agents.protocol.connection import Updates as Updates
from agents.protocol.connection import Welcome as Welcome
from agents.protocol.knobs import KnobState as KnobState
from agents.protocol.knobs import Legal as Legal
from agents.protocol.measurements import SAMPLES as SAMPLES
from agents.protocol.measurements import ExpertShare as ExpertShare
from agents.protocol.measurements import Loads as Loads
from agents.protocol.measurements import LoadSummary as LoadSummary
from agents.protocol.measurements import Sample as Sample
from agents.protocol.measurements import Vitals as Vitals
from agents.protocol.record_kinds import JOB_RECORDS as JOB_RECORDS
from agents.protocol.record_kinds import RECORDS as RECORDS
from agents.protocol.record_kinds import JobRecord as JobRecord
from agents.protocol.record_kinds import Record as Record
from agents.protocol.records import ALERT as ALERT
from agents.protocol.records import CHECKPOINT_STEP as CHECKPOINT_STEP
from agents.protocol.records import MISSING_STEPS as MISSING_STEPS
from agents.protocol.records import RESTART as RESTART
from agents.protocol.records import RESUMED as RESUMED
from agents.protocol.records import SAMPLE as SAMPLE
from agents.protocol.records import Action as Action
from agents.protocol.records import Alert as Alert
from agents.protocol.records import Board as Board
from agents.protocol.records import Bucketed as Bucketed
from agents.protocol.records import Comm as Comm
from agents.protocol.records import Event as Event
from agents.protocol.records import Experts as Experts
from agents.protocol.records import Gone as Gone
from agents.protocol.records import Hello as Hello
from agents.protocol.records import LayerLoad as LayerLoad
from agents.protocol.records import Peers as Peers
from agents.protocol.records import Pulse as Pulse
from agents.protocol.records import Recalled as Recalled
from agents.protocol.records import Step as Step
from agents.protocol.records import Summary as Summary
from agents.protocol.records import Timeline as Timeline
from agents.protocol.records import ToPeer as ToPeer
from agents.protocol.records import Traffic as Traffic
from agents.protocol.stacks import STACKS as STACKS
from agents.protocol.stacks import STACKS_FACT as STACKS_FACT
from agents.protocol.stacks import CodeFrame as CodeFrame
from agents.protocol.stacks import RankStacks as RankStacks
from agents.protocol.stacks import StackQuery as StackQuery
from agents.protocol.stacks import StacksCollected as StacksCollected
from agents.protocol.stacks import ThreadStack as ThreadStack
from agents.protocol.stacks import Unanswered as Unanswered
