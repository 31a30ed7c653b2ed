"""Files of a live hub are removed: connections stay open, and the hub restores the files."""

import shutil
import sqlite3
import stat
from contextlib import closing

from agents.client import Client
from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import COMMANDS_FILE, RECORD_FILE
from tests.faults.scaled import program
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until
from tests.unit.agents.recording.test_replay import recorded


def test_removed_sockets_and_hub_file_are_restored(own_hub: HubProcess, opened: Opened) -> None:
    own_hub.kill()
    own_hub.program = program("agents.hub.process", {"agents.hub.server.TICK_S": 0.1})
    own_hub.start()
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: client.state.board and client.state.summaries, fleet.turn)
    before = read_hub_file(own_hub.folder)

    shutil.rmtree(own_hub.endpoints.directory)
    (own_hub.folder / "hub.json").unlink()
    said = lambda what: any(what in event.text for event in client.state.events)  # noqa: E731
    poll_until(client, lambda: said("they are restored") and said("it is restored"), fleet.turn)
    assert client.resets == 1, "open connections stay open"
    assert read_hub_file(own_hub.folder) == before and before.live
    assert stat.S_IMODE(own_hub.endpoints.directory.stat().st_mode) == 0o700
    late, more = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(late, lambda: late.state.board, fleet.turn)
    more.close()

    shutil.rmtree(own_hub.endpoints.directory)
    own_hub.endpoints.directory.write_text("in the way")
    poll_until(client, lambda: said("new clients cannot find this hub"), fleet.turn)
    step = fleet.step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 3, fleet.turn)
    assert sum("new clients cannot find this hub" in event.text for event in client.state.events) == 1
    own_hub.endpoints.directory.unlink()
    assert own_hub.stop() == 0 and not (own_hub.folder / "hub.json").exists()


def test_removed_files_of_the_run_are_restored(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: client.state.board and client.state.summaries, fleet.turn)
    asked = client.propose({"micro_batches": 8})
    done = lambda: asked in client.state.commands and client.state.commands[asked].settled  # noqa: E731
    poll_until(client, done, fleet.turn)
    first, seq = client.state.summaries[0].step, client.seq
    poll_until(client, lambda: recorded(own_hub.folder / RECORD_FILE) >= seq, fleet.turn)
    for name in (RECORD_FILE, COMMANDS_FILE):
        for beside in ("", "-wal", "-shm"):
            (own_hub.folder / f"{name}{beside}").unlink()
    said = lambda: sum("removed; it is restored" in event.text for event in client.state.events)  # noqa: E731
    poll_until(client, lambda: said() == 2, fleet.turn)
    epoch, seq = client.epoch, client.seq
    poll_until(client, lambda: recorded(own_hub.folder / RECORD_FILE) >= seq, fleet.turn)
    own_hub.kill()
    own_hub.start()
    poll_until(client, lambda: client.epoch != epoch and done(), fleet.turn)
    assert client.state.commands[asked].revision == 1
    poll_until(client, lambda: client.state.summaries and client.state.summaries[0].step == first, fleet.turn)
    assert said() == 2


def test_a_locked_recording_delays_no_command(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: client.state.board and client.state.summaries, fleet.turn)
    path = own_hub.folder / RECORD_FILE
    poll_until(client, path.exists, fleet.turn)
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10.0)) as slow:
        slow.execute("BEGIN IMMEDIATE")
        asked = client.propose({"micro_batches": 8})
        poll_until(client, lambda: asked in client.state.commands, fleet.turn)
        poll_until(client, lambda: client.state.commands[asked].settled, fleet.turn)
        assert client.state.commands[asked].state == "applied"
