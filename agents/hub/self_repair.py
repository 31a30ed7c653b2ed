"""Self-repair: restores a hub's ipc sockets and its `hub.json` if they are removed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from agents.rundir.hub_file import HUB_FILE, HubFile, write_hub_file
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import check_socket_directory
from agents.transport.addresses import Endpoints
from agents.transport.server_sockets import ServerSockets

LogLine = tuple[Literal["info", "warning", "error"], str]


class SelfRepair:
    """Checks the sockets and hub.json, and restores them. While files are missing, open connections continue, but new
    clients cannot connect.
    """

    def __init__(
        self, folder: Path, ipc: Endpoints, sockets: ServerSockets, file: Callable[[], HubFile]
    ) -> None:
        self._folder = folder
        self._ipc = ipc
        self._sockets = sockets
        self._file = file
        self._written = False  # whether hub.json has been written, so that it must exist
        self._problem = ""

    def write_file(self) -> HubFile:
        """Write hub.json after the sockets are bound. Raises OSError if the file cannot be written."""
        file = self._file()
        write_hub_file(self._folder, file)
        self._written = True
        return file

    def check(self) -> Iterator[LogLine]:
        """Restore missing files and return lines for the run's log. If no file is missing, the only cost is calls of
        `stat`."""
        problem = ""
        try:
            if not all(path.exists() for path in self._ipc.paths):
                check_socket_directory(self._ipc.directory)
                self._sockets.bind_again()
                yield (
                    "warning",
                    f"the sockets in {self._ipc.directory} were removed; they are restored",
                )
            if self._written and not (self._folder / HUB_FILE).exists():
                self.write_file()
                yield "warning", f"{self._folder / HUB_FILE} was removed; it is restored"
        except (RunError, OSError) as error:
            problem = f"new clients cannot find this hub: {error}"
        if problem and problem != self._problem:
            yield "error", problem
        self._problem = problem
