"""Finds the hardware description of a machine by its name in the planner's hardware table, or reads one from a user's
TOML file."""

import difflib
import tomllib
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agents.rundir.bounded_read import read_ordinary
from engine.config.refusal import RefusedError, shown
from engine.planner.hardware.description import AtLeast0, AtLeast2, Device, Hardware, Link, Size
from engine.planner.hardware.efficiency import efficiencies

MOST_BYTES = 2**20  # maximum size of a hardware file


class HardwareError(RefusedError):
    """An unknown hardware name, or an error in a hardware file; the message is one sentence."""


class _Device(Struct, frozen=True, forbid_unknown_fields=True):
    memory_gib: Size
    memory_bandwidth: Size
    peak: dict[str, Size]
    source: str


class _Link(Struct, frozen=True, forbid_unknown_fields=True):
    latency: AtLeast0
    bandwidth: Size
    source: str
    ranks: AtLeast2 | None = None


class _Machine(Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    links: list[str]
    generation: str


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    devices: dict[str, _Device]
    links: dict[str, _Link]
    machines: dict[str, _Machine]


def names() -> list[str]:
    """The names of the machines in the hardware table."""
    return list(_table().machines)


def networks() -> list[str]:
    """The names of the links that can connect any number of ranks, and therefore all nodes of a cluster."""
    return [name for name, link in _table().links.items() if link.ranks is None]


@lru_cache(maxsize=256)
def hardware(name: str) -> Hardware:
    """The hardware description of the machine with this name. In a name such as H100/roce-400, the part after the slash
    replaces the machine's network. Raises HardwareError."""
    table = _table()
    machine_name, _, network = name.partition("/")
    if machine_name not in table.machines:
        raise HardwareError(
            f"hardware {shown(name)} is not known{_close(machine_name)}; legal: {', '.join(names())}, or a "
            f"TOML file that describes a machine"
        )
    if "/" in name and network not in networks():
        raise HardwareError(
            f"hardware {shown(name)}: {shown(network)} is not a known network; legal: {', '.join(networks())}"
        )
    machine = table.machines[machine_name]
    levels = [*machine.links[:-1], network or machine.links[-1]]
    links = tuple(_named(level, table.links[level]) for level in levels)
    found = table.devices[machine.device]
    device = Device(found.memory_gib * 2**30, found.memory_bandwidth, found.peak, found.source)
    return Hardware(name, device, links, efficiencies()[machine.generation])


def by_device(device: str) -> Hardware | None:
    """The machine of the hardware table that has this device, or None. For example, the device "NVIDIA A100-SXM4-80GB"
    matches the machine A100-80, because the device name contains both the chip and the memory size."""
    known = [(name, *name.partition("-")[::2]) for name in names()]
    fitting = [(len(chip), memory in device, name) for name, chip, memory in known if chip in device]
    return hardware(max(fitting, key=lambda one: one[:2])[2]) if fitting else None


def load(path: str | Path) -> Hardware:
    """Read a hardware description from a TOML file, such as one written by `engine probe`. Raises HardwareError."""
    try:
        text = read_ordinary(Path(path), MOST_BYTES).decode()
    except OSError as error:
        raise HardwareError(f"cannot read the hardware file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HardwareError(f"the hardware file {path} is not UTF-8 text") from None
    try:
        found = msgspec.convert(_with_ranks(tomllib.loads(text)), Hardware)
    except (ValueError, RecursionError) as error:  # the errors of msgspec and tomllib are ValueErrors
        raise HardwareError(f"the hardware file {path} is not legal: {error}") from None
    if not found.links or found.links[-1].ranks is not None:
        raise HardwareError(
            f"the hardware file {path} has no link that joins any number of ranks; legal: a last [[links]] "
            "without ranks"
        )
    for kind, (low, high) in found.efficiency.spread.items():
        if low > high:
            raise HardwareError(
                f"the hardware file {path} is not legal: efficiency.spread.{shown(kind)} = [{low:g}, {high:g}]; legal: "
                "the lower end first"
            )
    if found.measured and 0 < found.measured.pointwise < 1:
        raise HardwareError(
            f"the hardware file {path} is not legal: measured.pointwise = {found.measured.pointwise:g}; legal: 0 (the "
            "memory bandwidth), or 1 to 1e18 bytes/s"
        )
    if not found.device.peak:
        raise HardwareError(
            f"the hardware file {path} has no rate in device.peak; legal: at least one, such as bf16 = 3e14"
        )
    return found


def _with_ranks(tree: dict[str, Any]) -> dict[str, Any]:
    """Add `ranks = None` (any number of ranks) to links without `ranks`. TOML has no null, so a description file
    expresses "any number" by omitting the key."""
    links = tree.get("links")
    if isinstance(links, list):
        tree["links"] = [{"ranks": None} | link if isinstance(link, dict) else link for link in links]
    return tree


def find_hardware(name_or_path: str) -> Hardware:
    """The hardware description of a machine in the hardware table, or the one in a file. `name_or_path` is a path if it
    ends in .toml, or if it names an existing file and no machine in the table."""
    if name_or_path.endswith(".toml") or (name_or_path not in names() and Path(name_or_path).is_file()):
        return load(name_or_path)
    return hardware(name_or_path)


def _named(name: str, link: _Link) -> Link:
    return Link(name, link.ranks, link.latency, link.bandwidth, link.source)


def _close(name: str) -> str:
    close = difflib.get_close_matches(name.upper(), names(), 1)
    return f"; did you mean {close[0]}?" if close else ""


@lru_cache(maxsize=1)
def _table() -> _Table:
    text = resources.files(__package__).joinpath("table.toml").read_text()
    return msgspec.convert(tomllib.loads(text), _Table)
