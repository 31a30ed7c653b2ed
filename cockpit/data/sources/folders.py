"""Finds the folder of a run on this machine, for its logs and settings."""

from pathlib import Path

from agents.rundir.hub_file import HubFile
from agents.rundir.local_machine import Machine, this_host, this_machine
from agents.rundir.runs import RunError, find_folder, list_runs, newest_live
from agents.transport.addresses import Endpoints
from cockpit.data.sources.connection import runs_dir
from cockpit.data.store import Store, Topic


def run_folder(run: str | None) -> Path | None:
    """The folder of a run; None if the folder is not on this machine. `run` has the same form as the argument of
    `cockpit attach`: a name, a folder or a URL; without it, the newest live run is meant. A URL is looked up among the
    hubs of the runs in the runs folder."""
    if run is None:
        newest = newest_live(runs_dir())
        return newest.folder if newest else None
    if "://" in run:
        return next((one.folder for one in list_runs(runs_dir()) if one.hub and _serves(one.hub, run)), None)
    try:
        return find_folder(run, runs_dir())
    except RunError:
        return None


def _serves(hub: HubFile, url: str) -> bool:
    """Whether `url` is a socket of this hub, or the directory of the hub's sockets."""
    known: list[Endpoints] = [one for one in (hub.endpoints, hub.tcp) if one]
    ends = {end for one in known for end in (one.ranks, one.clients)}
    return url in ends or url == f"ipc://{hub.endpoints.directory}"


def told_folder(store: Store) -> Path | None:
    """The folder that the run's leader reports, if the leader runs or is simulated on this machine and the folder
    exists.
    """
    return store.once("reported folder", (Topic.GRID,), lambda: _reported_folder(store))


def _reported_folder(store: Store) -> Path | None:
    folder = store.fact("folder")
    leader = next((hello for hello in store.state.hellos.values() if hello.leader), None)
    if leader and leader.machine:
        here = Machine.parse(leader.machine).kernel == Machine.parse(this_machine()).kernel
    else:
        here = (store.fact("simulated_on") or (leader.host if leader else None)) == this_host()
    if not here or not isinstance(folder, str):
        return None
    try:
        return Path(folder) if Path(folder).is_dir() else None
    except (OSError, ValueError):
        return None
