"""Addresses of hubs over TCP: what may be listened on, and what may be connected to."""

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
    """Where a hub listens: ranks connect to the one, watchers and operators to the other."""

    ranks: str
    clients: str
    keys: str = ""  # over TCP: the folder of keys that the hub uses
    hub: str = ""  # over TCP: the hub's public key

    @property
    def paths(self) -> list[Path]:
        """The files of both sockets."""
        return [Path(url.removeprefix("ipc://")) for url in (self.ranks, self.clients)]

    @property
    def directory(self) -> Path:
        """The directory both sockets lie in."""
        return Path(self.clients.removeprefix("ipc://")).parent


def listen_address(text: str) -> tuple[str, int]:
    """Host and port (0: a free one) of ``tcp://ADDRESS:PORT|auto``, or of ``auto``: the loopback.

    RunError: it is no such thing, or every address of the machine at once.
    """
    if text == "auto":
        return LOOPBACK, 0
    host, port = _parse(text, LEGAL)
    if every_address(host):
        raise RunError(
            f"{text} would listen on every address of this machine, which is not offered; name one, such as "
            f"tcp://{LOOPBACK}:auto"
        )
    return host, port


def connect_address(text: str) -> str:
    """``tcp://HOST:PORT`` as it was given; RunError if nothing can be reached at it."""
    legal = "tcp://HOST:PORT"
    host, port = _parse(text, legal)
    if port == 0 or every_address(host):
        raise RunError(f"{text} is not the address of a hub; legal: {legal}")
    return text


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://{host}:{port}"


def own_address(met_at: str) -> str:
    """The address of this machine by which others reach it, who meet at the host `met_at`; RunError: it is unclear.

    That host's own address where it is this machine; else the one from which we would speak to it.
    """
    try:
        found = socket.getaddrinfo(met_at, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise RunError(f"the host {met_at} cannot be found: {error.strerror}") from None
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect((address[0], 9))  # sends nothing: it only looks for the way
            host = str(probe.getsockname()[0])
            if not _plain(host).is_loopback:
                return f"[{host}]" if family == socket.AF_INET6 else host
    raise RunError(
        f"{met_at} is this machine by its loopback only, which no other reaches; name an address with "
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
        raise RunError(f"{text} has no port; legal: 1 to 65535")
    return found[1], port


def every_address(host: str) -> bool:
    """Whether to listen there is to listen on every address of the machine."""
    if host == "*":
        return True
    try:
        return _plain(host.strip("[]")).is_unspecified
    except ValueError:
        with contextlib.suppress(OSError):  # else a name; "0", "0x0.0" and the like are read as libc does
            return socket.inet_aton(host) == bytes(4)
        return False


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; one of IPv4 also where it is written as one of IPv6 (``::ffff:0.0.0.0``). ValueError: it is none."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
