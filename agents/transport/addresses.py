"""TCP addresses of hubs: which addresses a hub may listen on, and which a peer may connect to."""

import contextlib
import ipaddress
import re
import socket
from pathlib import Path

from msgspec import Struct

from agents.protocol.base import RunError

LOOPBACK = "127.0.0.1"
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+|\*):(auto|\d{1,5})")
LEGAL = "tcp://ADDRESS:PORT, tcp://ADDRESS:auto, or auto"


class Endpoints(Struct, frozen=True, omit_defaults=True):
    """The endpoints of a hub: ranks connect to `ranks`, and cockpits and scripts to `clients` or, if they only watch,
    to `viewers`.
    """

    ranks: str
    clients: str
    keys: str = ""  # over TCP: the hub's key folder
    hub: str = ""  # over TCP: the hub's public key
    viewers: str = ""  # only over ipc; empty for hubs of earlier releases

    @property
    def paths(self) -> list[Path]:
        """The paths of the ipc socket files."""
        urls = (self.ranks, self.clients, self.viewers)
        return [Path(url.removeprefix("ipc://")) for url in urls if url]

    @property
    def directory(self) -> Path:
        """The directory that contains the ipc sockets."""
        return Path(self.clients.removeprefix("ipc://")).parent


def listen_address(text: str) -> tuple[str, int]:
    """The host and the port of ``tcp://ADDRESS:PORT`` or ``tcp://ADDRESS:auto``; ``auto`` alone means the loopback
    address. Port 0 means any free port.

    Raises RunError if `text` is not such an address, or if it is the wildcard address (all interfaces).
    """
    if text == "auto":
        return LOOPBACK, 0
    host, port = _parse(text, LEGAL)
    if every_address(host):
        raise RunError(
            f"{text} would listen on every address of this machine, which is not allowed; name one, such as "
            f"tcp://{LOOPBACK}:auto"
        )
    return host, port


def connect_address(text: str) -> str:
    """Return `text` if it is ``tcp://HOST:PORT``; raise RunError if it is not."""
    legal = "tcp://HOST:PORT"
    host, port = _parse(text, legal)
    if port == 0 or every_address(host):
        raise RunError(f"{text} is not the address of a hub; legal: {legal}")
    return text


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://{host}:{port}"


def own_address(met_at: str) -> str:
    """The local IP address that this machine uses for connections to the host `met_at`. Raises RunError if no such
    address is found."""
    try:
        found = socket.getaddrinfo(met_at, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise RunError(f"the host {met_at} cannot be found: {error.strerror}") from None
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect((address[0], 9))  # sends no packet; the kernel only selects a route
            host = str(probe.getsockname()[0])
            if not _plain(host).is_loopback:
                return f"[{host}]" if family == socket.AF_INET6 else host
    raise RunError(
        f"{met_at} resolves to the loopback of this machine, which other machines cannot reach; name an address with "
        "--listen tcp://ADDRESS:auto"
    )


def is_tcp(url: str) -> bool:
    return url.startswith("tcp://")


def _parse(text: str, legal: str) -> tuple[str, int]:
    found = _TCP.fullmatch(text)
    if found is None:
        raise RunError(f"{text[:80]} is not a TCP address; legal: {legal}")
    port = 0 if found[2] == "auto" else int(found[2])
    if port > 65535 or found[2].strip("0") == "":
        raise RunError(f"{text} has the port {port}; legal: 1 to 65535")
    return found[1], port


def every_address(host: str) -> bool:
    """Whether `host` is the wildcard address (all interfaces)."""
    if host == "*":
        return True
    try:
        return _plain(host.strip("[]")).is_unspecified
    except ValueError:
        with contextlib.suppress(OSError):  # a host name, unless libc reads it as an address, such as "0"
            return socket.inet_aton(host) == bytes(4)
        return False


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; an IPv4-mapped address (``::ffff:0.0.0.0``) becomes IPv4. Raises ValueError if `address` is not
    an IP address.
    """
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
