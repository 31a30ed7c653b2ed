"""Limits of a process on open files, which also limit its connections, and on threads."""

import os
import resource
import threading
from contextlib import ExitStack

from agents.protocol.base import RunError

FILES = 65_536  # each connection takes one descriptor
# What a socket of libzmq needs at most: 6 descriptors, 3 more with a monitor and 1 for each connection; 2 threads.
ROOM_FILES, ROOM_THREADS = 10, 3


class NoRoomError(RunError):
    """This process cannot open the files or start the threads that a connection needs."""


def check_room() -> None:
    """Raise NoRoomError if this process is so close to its limits that libzmq could not start. libzmq would not report
    an error then: it aborts the process. Once it has started, it can wait until a descriptor is free."""
    over, threads = threading.Event(), list[threading.Thread]()
    try:
        with ExitStack() as stack:
            for _ in range(ROOM_FILES):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for _ in range(ROOM_THREADS):
                thread = threading.Thread(target=over.wait, daemon=True)
                thread.start()
                threads.append(thread)
    except OSError as error:
        raise NoRoomError(
            f"no connection to the hub, which needs {ROOM_FILES} free file descriptors: {error.strerror} (limit: "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, see ulimit -n)"
        ) from None
    except (RuntimeError, MemoryError):
        raise NoRoomError(
            f"no connection to the hub, which needs {ROOM_THREADS} more threads than this process may start (see "
            "ulimit -u and ulimit -v)"
        ) from None
    finally:
        over.set()
        for thread in threads:
            thread.join()


def raise_file_limit() -> None:
    """Raise the limit on open files to `FILES`, or to the maximum that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
