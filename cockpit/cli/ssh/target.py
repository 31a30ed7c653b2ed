"""The parts of an ``ssh://`` URL. Each part is checked, so that ssh cannot interpret the part as an option, and a shell
cannot interpret it as a command."""

import re
from dataclasses import dataclass

from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.ssh_sockets import SCHEME

LEGAL = "ssh://[USER@]HOST[:PORT][/RUN], ssh://HOST/PATH/OF/RUN or ssh://HOST/~/PATH/OF/RUN"
LONGEST = 1024
# A name of a file: ASCII letters, digits and . _ + -; it does not start with - or +, and is not . or ..
_PART = r"(?:\.?[A-Za-z0-9_][A-Za-z0-9._+-]*)"
_URL = re.compile(
    rf"{SCHEME}(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]*)@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+(?:%[A-Za-z0-9._-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    rf"(?:/(?P<path>(?:~/)?{_PART}(?:/{_PART})*))?/?",
    re.ASCII,
)


@dataclass(frozen=True)
class SshTarget:
    """A run, or a folder of runs, on another machine."""

    url: str
    host: str  # a name or an address, without brackets
    user: str | None
    port: int | None
    # A name (as for `cockpit attach` on that machine), an absolute path, or a path relative to the home folder; None:
    # the newest live run.
    path: str | None

    @property
    def login(self) -> str:
        """USER@HOST, or HOST, as a person would type it after ``ssh``."""
        port = f" -p {self.port}" if self.port else ""
        return f"{self.user}@{self.host}{port}" if self.user else f"{self.host}{port}"

    def arguments(self) -> list[str]:
        """The last arguments of ssh before the remote command: the options for user and port, ``--``, and the host."""
        user = ["-l", self.user] if self.user else []
        port = ["-p", str(self.port)] if self.port else []
        return [*user, *port, "--", self.host]


def parse(url: str) -> SshTarget:
    """Parse and check the URL. Raises CockpitError, with a one-sentence message, if the URL is not valid."""
    found = _URL.fullmatch(url) if len(url) <= LONGEST else None
    if found is None:
        raise CockpitError(f"{url[:80]!r} is not a run on another machine; legal: {LEGAL}")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise CockpitError(f"{url[:80]} names port {port}; legal: 1 to 65535")
    path = found["path"]
    if path and path.startswith("~/"):
        path = path.removeprefix("~/")
    elif path and "/" in path:
        path = f"/{path}"
    return SshTarget(url, found["host"].strip("[]"), found["user"], port, path)
