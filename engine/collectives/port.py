"""Point-to-point messages between the ranks of a group, with counters of messages and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Messages = Sequence[tuple[int, Tensor]]
"""Rank of the group, and the contiguous tensor that it receives or that its message is written to."""


class Transport(Protocol):
    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send and receive at the same time, and wait for both."""


class GroupTransport:
    """Sends and receives messages over a torch process group (gloo or NCCL). With gloo, messages with different tags
    can be in flight at the same time, such as those of two threads."""

    def __init__(self, group: ProcessGroup, tag: int = 0):
        self._group, self._tag = group, tag

    def exchange(self, sends: Messages, receives: Messages) -> None:
        # In a batch, NCCL uses the group's communicator instead of creating one for the pair.
        pairs = [(dist.isend, one) for one in sends] + [(dist.irecv, one) for one in receives]
        operations = [
            dist.P2POp(call, x, group=self._group, tag=self._tag, group_peer=peer)
            for call, (peer, x) in pairs
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


@dataclass
class Traffic:
    """Counts the messages that a rank sends and receives. `steps`: number of calls of `Port.exchange` that send or
    receive data. `longest`: the larger of the bytes sent and the bytes received in a call, summed over calls, because
    links carry both directions at the same time."""

    sent_bytes: int = 0
    steps: int = 0
    longest: int = 0


class Port:
    """This rank's connection to `members`, which are ranks of the transport's group. The methods take ranks as indices
    into `members`."""

    def __init__(
        self, transport: Transport, members: Sequence[int], rank: int, traffic: Traffic | None = None
    ):
        self._transport, self._members = transport, members
        self.rank, self.size = rank, len(members)
        self.traffic = traffic or Traffic()

    @classmethod
    def of(cls, group: ProcessGroup, tag: int = 0) -> "Port":
        """A `Port` through which this rank exchanges messages with all ranks of a process group."""
        return cls(GroupTransport(group, tag), range(group.size()), group.rank())

    def among(self, members: Sequence[int]) -> "Port":
        """A `Port` to some of the members, which must include this rank. Both objects count their messages in the same
        `traffic`."""
        real = [self._members[member] for member in members]
        return Port(self._transport, real, list(members).index(self.rank), self.traffic)

    def exchange(self, sends: Messages = (), receives: Messages = ()) -> None:
        """Send and receive at the same time, and wait for both. Empty tensors are not sent."""
        sends, receives = self._real(sends), self._real(receives)
        if not sends and not receives:
            return
        sent, received = (sum(x.nbytes for _, x in messages) for messages in (sends, receives))
        self.traffic.sent_bytes += sent
        self.traffic.steps += 1
        self.traffic.longest += max(sent, received)
        self._transport.exchange(sends, receives)

    def _real(self, messages: Messages) -> Messages:
        return [(self._members[peer], x) for peer, x in messages if x.numel()]

    def add_from(self, peer: int, x: Tensor, received: Tensor, send: Tensor | None = None) -> None:
        """Receive a tensor from `peer` into the buffer `received`, and at the same time send the tensor `send` (if not
        None) to `peer`. Then add `received` to `x`.
        """
        self.exchange([] if send is None else [(peer, send)], [(peer, received)])
        x.add_(received)
