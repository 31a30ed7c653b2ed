"""Messages that collect the Python stacks of ranks, to explain a hang."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from agents.protocol.base import Count, Message, Name, Rank, Real, Text

STACKS: Final = "stacks"
"""The capability (`Hello.capabilities`) of a rank that answers stack queries."""

STACKS_FACT: Final = "stacks"
"""Fact of the event that explains a stall by the stacks of its ranks: the number of ranks that answered. Further facts
are `rank` (the first odd rank, if there is one) and `odd` (how many there are)."""

MOST_RANKS: Final = 4096  # maximum number of ranks in one query
MOST_FRAMES: Final = 64  # maximum number of frames of one thread
MOST_THREADS: Final = 32
MOST_UNANSWERED: Final = 256  # maximum number of ranks named in one answer
WORD: Final = 256  # maximum number of characters of a file, a function, a line of code

Word = Annotated[str, Meta(max_length=WORD)]


class StackQuery(Message, frozen=True):
    """Requests the Python stacks of `ranks` (empty: all). A client sends this query to the hub, and the hub sends its
    own query to the ranks. `threads`: request all threads, not only the training thread.
    """

    id: Name
    ranks: Annotated[list[Rank], Meta(max_length=MOST_RANKS)] = []
    threads: bool = False


class CodeFrame(Struct, array_like=True, frozen=True):
    """One frame of a Python stack. `installed`: the file belongs to Python or to an installed package, not to the
    program."""

    file: Word  # the end of its path, if the path is too long
    line: Count
    function: Word
    code: Word = ""  # the line of source; "" if it is not known, or has changed since the process began
    installed: bool = False


class ThreadStack(Struct, array_like=True, frozen=True):
    """The stack of one thread, outermost frame first. `omitted` is the number of frames left out before the frame with
    index `gap`.
    """

    name: Word
    frames: Annotated[list[CodeFrame], Meta(max_length=MOST_FRAMES)]
    omitted: Count = 0
    gap: Count = 0


class RankStacks(Message, frozen=True):
    """The answer of one rank to a stack query: the stacks of its threads, training thread first, and the operation that
    the rank reports as its current one."""

    rank: Rank
    id: Name  # id of the query
    step: Count
    doing: Text
    since_ms: Real  # time since the operation started
    threads: Annotated[list[ThreadStack], Meta(max_length=MOST_THREADS)]
    omitted_threads: Count = 0
    # The newest collectives, from the program's recorder of collectives; "" if there is no recorder.
    collective: Text = ""


class Unanswered(Struct, array_like=True, frozen=True):
    """A rank that did not answer. `why` is the reason, such as the state of the rank's process if the hub can check the
    process."""

    rank: Rank
    why: Annotated[str, Meta(max_length=512)]


class StacksCollected(Message, frozen=True):
    """The last message of the hub's answer to query `id`, sent after the stacks of `answered` ranks."""

    id: Name
    world: Count
    answered: Count
    unanswered: Annotated[list[Unanswered], Meta(max_length=MOST_UNANSWERED)] = []
    more_unanswered: Count = 0  # number of further ranks that did not answer
    not_asked: Count = 0  # number of ranks beyond the limit of one query
