"""Sees that a hub can still be found, for someone may clean up under it: its sockets, and `hub.json`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from agents.rundir.hub_file import HUB_FILE, HubFile, write_hub_file
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import check_socket_directory
from agents.transport.addresses import Endpoints
from agents.transport.server_sockets import ServerSockets

Told = tuple[Literal["info", "warning", "error"], str]


class SelfRepair:
    """Whoever is connected stays so when a socket's file is removed; nobody else could come any more."""

    def __init__(
        self, folder: Path, ipc: Endpoints, sockets: ServerSockets, file: Callable[[], HubFile]
    ) -> None:
        self._folder = folder
        self._ipc = ipc
        self._sockets = sockets
        self._file = file
        self._written = False  # hub.json was, so that there is one to be missed
        self._problem = ""

    def write_file(self) -> HubFile:
        """Tell the world where this hub listens; after the sockets are bound. OSError: it cannot be told."""
        file = self._file()
        write_hub_file(self._folder, file)
        self._written = True
        return file

    def look(self) -> Iterator[Told]:
        """Put back what is gone; what to tell people. A few looks at a directory, when all is well."""
        problem = ""
        try:
            if not all(path.exists() for path in self._ipc.paths):
                check_socket_directory(self._ipc.directory)
                self._sockets.bind_again()
                yield (
                    "warning",
                    f"the sockets in {self._ipc.directory} were removed; the hub listens there again",
                )
            if self._written and not (self._folder / HUB_FILE).exists():
                self.write_file()
                yield "warning", f"{self._folder / HUB_FILE} was removed; it is written anew"
        except (RunError, OSError) as error:
            problem = f"nobody can find this hub any more: {error}"
        if problem and problem != self._problem:
            yield "error", problem
        self._problem = problem
