"""No more connections than a hub has file descriptors for.

libzmq accepts whatever comes. When no descriptor is left it tries again without end, which takes a core, and nothing
else in the process can open a file. So the last few are kept free: a connection that takes one is closed at once.
"""

import contextlib
import resource
import socket
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

RESERVE_TCP: Final = 48  # descriptors that are kept free: for local peers,
RESERVE_IPC: Final = 16  # and for files


class Admission:
    """Looks at what a listening socket accepts. `turned_away` counts what was closed since it was last set to 0."""

    def __init__(self, listening: zmq.Socket[bytes], reserve: int) -> None:
        self.turned_away = 0
        self._listening = listening
        self._reserve = reserve
        self.monitor = listening.get_monitor_socket(zmq.EVENT_ACCEPTED)

    def look(self) -> None:
        """Close what was accepted with a descriptor of the reserve."""
        while self.monitor.poll(0):
            descriptor = recv_monitor_message(self.monitor)["value"]
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            # The system gives the lowest that is free: all below this one are in use.
            crowded = limit != resource.RLIM_INFINITY and descriptor >= limit - self._reserve
            if crowded and _shut(descriptor):
                self.turned_away += 1

    def close(self) -> None:
        """Before the socket is closed; its context would wait for the monitor."""
        self._listening.disable_monitor()
        self.monitor.close(0)


def _shut(descriptor: int) -> bool:
    """End a connection whose descriptor is libzmq's, which then closes it; False if it has done so already."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
        return True
    return False
