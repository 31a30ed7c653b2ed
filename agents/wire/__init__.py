"""Every message that crosses a socket: typed, versioned, plain msgpack.

A frame is one msgpack value ``[version, [message, ...]]``; a message is ``[kind, field, ...]`` (an array-like
Struct), so a newer peer may append fields and an older one ignores them. Batches are lists inside one frame,
never multipart. `codec.decode` is the only way in: it checks size, version and types before anything is looked at.

Units: ``_ms`` milliseconds, ``bytes`` bytes sent to other ranks, times ``_s`` seconds since the epoch.
``None`` is "no data" and is never the same as zero.
"""

from agents.wire.control import MOST_TRIAL_STEPS as MOST_TRIAL_STEPS
from agents.wire.control import PAUSED as PAUSED
from agents.wire.control import PREVIEWS as PREVIEWS
from agents.wire.control import Ack as Ack
from agents.wire.control import Command as Command
from agents.wire.control import CommandState as CommandState
from agents.wire.control import Decide as Decide
from agents.wire.control import Estimate as Estimate
from agents.wire.control import Preview as Preview
from agents.wire.control import Previewed as Previewed
from agents.wire.control import Propose as Propose
from agents.wire.control import TrialState as TrialState
from agents.wire.control import Try as Try
from agents.wire.knobs import KnobState as KnobState
from agents.wire.knobs import Legal as Legal
from agents.wire.measures import SAMPLES as SAMPLES
from agents.wire.measures import ExpertShare as ExpertShare
from agents.wire.measures import Loads as Loads
from agents.wire.measures import LoadSummary as LoadSummary
from agents.wire.measures import Sample as Sample
from agents.wire.measures import Vitals as Vitals
from agents.wire.records import CHECKPOINT_STEP as CHECKPOINT_STEP
from agents.wire.records import Action as Action
from agents.wire.records import Alert as Alert
from agents.wire.records import Board as Board
from agents.wire.records import Bucketed as Bucketed
from agents.wire.records import Comm as Comm
from agents.wire.records import Event as Event
from agents.wire.records import Experts as Experts
from agents.wire.records import Gone as Gone
from agents.wire.records import Hello as Hello
from agents.wire.records import LayerLoad as LayerLoad
from agents.wire.records import Peers as Peers
from agents.wire.records import Pulse as Pulse
from agents.wire.records import Recalled as Recalled
from agents.wire.records import Step as Step
from agents.wire.records import Summary as Summary
from agents.wire.records import Timeline as Timeline
from agents.wire.records import ToPeer as ToPeer
from agents.wire.records import Traffic as Traffic
from agents.wire.talk import AnyMessage as AnyMessage
from agents.wire.talk import Control as Control
from agents.wire.talk import Credit as Credit
from agents.wire.talk import Refused as Refused
from agents.wire.talk import Relay as Relay
from agents.wire.talk import Update as Update
from agents.wire.talk import Updates as Updates
from agents.wire.talk import Welcome as Welcome
from agents.wire.terms import FRAME_BYTES as FRAME_BYTES
from agents.wire.terms import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from agents.wire.terms import MESSAGE_BYTES as MESSAGE_BYTES
from agents.wire.terms import TEXT as TEXT
from agents.wire.terms import VERSION as VERSION
from agents.wire.terms import Changes as Changes
from agents.wire.terms import Coords as Coords
from agents.wire.terms import Count as Count
from agents.wire.terms import Facts as Facts
from agents.wire.terms import FiniteValue as FiniteValue
from agents.wire.terms import Message as Message
from agents.wire.terms import Name as Name
from agents.wire.terms import Parts as Parts
from agents.wire.terms import Phases as Phases
from agents.wire.terms import Rank as Rank
from agents.wire.terms import Real as Real
from agents.wire.terms import Revision as Revision
from agents.wire.terms import Text as Text
from agents.wire.terms import Unknown as Unknown
from agents.wire.terms import Value as Value
from agents.wire.terms import WireError as WireError
from agents.wire.terms import clean as clean
from agents.wire.terms import clip as clip
from agents.wire.terms import spell as spell
