"""Two simulated machines: network namespaces with a virtual link between them."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000


class NoHosts(Exception):
    """This machine does not allow network namespaces."""


@dataclass(frozen=True)
class Host:
    """One network namespace and its end of the link."""

    name: str
    address: str
    device: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs the command `words` in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which this thread, and the threads and sockets that it creates, belong to this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/thread-self/ns/net").open() as home, Path(f"/run/netns/{self.name}").open() as there:
            for namespace in (there, home):
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise NoHosts(os.strerror(ctypes.get_errno()))
                if namespace is there:
                    yield

    def plug(self, state: str) -> None:
        """Set the link `up` or `down`."""
        _ip("-n", self.name, "link", "set", self.device, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two network namespaces that are connected by a virtual link, as two simulated machines. Raises NoHosts if
    this process lacks the necessary rights."""
    if shutil.which("ip") is None:
        raise NoHosts("there is no `ip` here")
    ours = os.getpid()
    hosts = tuple(Host(f"cockpit-{ours}-{i}", f"10.213.77.{i + 1}", f"ck{ours}-{i}") for i in range(2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", hosts[0].device, "type", "veth", "peer", "name", hosts[1].device)
        for host in hosts:
            _ip("link", "set", host.device, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/30", "dev", host.device)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.plug("up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            with contextlib.suppress(NoHosts):
                _ip("netns", "del", host.name)
        with contextlib.suppress(NoHosts):
            _ip("link", "del", hosts[0].device)  # if the device has not been moved to a namespace yet


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise NoHosts(f"ip {' '.join(words)}: {done.stderr.strip()}")
