"""The hub of a run: a separate process between the ranks and all clients.

    python -m agents.hub --run NAME --dir RUNDIR [--sockets DIR] [--listen tcp://ADDRESS:PORT] [--parent PID] ...

The hub orders all updates (`UpdateLog`), sends them to clients (`Subscribers`), and passes the clients' proposals to
the leader rank (`Control`). If the hub is killed, the ranks continue training. A hub that is restarted in the same run
folder listens on the same endpoints, and restores its commands, its trials, and the run's curves and events.
"""

import os
import time
from collections.abc import Sequence as Words
from pathlib import Path
from typing import Literal

import zmq

from agents import protocol
from agents.alerts.notify import Notifier
from agents.hub.client_requests import ClientRequests
from agents.hub.commands.control import Control
from agents.hub.commands.journal import Journal
from agents.hub.commands.preview_queries import PreviewQueries
from agents.hub.commands.stack_queries import StackQueries
from agents.hub.commands.trials import Trials
from agents.hub.ingest import Ingest
from agents.hub.memory_limit import MemoryLimit
from agents.hub.received_frames import ReceivedFrames
from agents.hub.recorder import Limits, Recorder
from agents.hub.run_end import RunEnd
from agents.hub.self_repair import SelfRepair
from agents.hub.telemetry.alerting import Alerts
from agents.hub.telemetry.history import History
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.hub.telemetry.sampling_leases import SamplingLeases
from agents.hub.telemetry.subscribers import Subscribers
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import SAMPLES, Event, Message, Refused, clip, codec
from agents.rundir import runs
from agents.rundir.hub_file import HubFile, folder_identity, remove_hub_file
from agents.rundir.local_machine import process_start, this_host, this_machine
from agents.rundir.socket_directory import remove_sockets
from agents.transport.addresses import Endpoints
from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role
from agents.transport.server_sockets import LEAVE_S, ServerSockets

FLUSH_MS = 10  # interval between sending to clients, so that one frame has many updates
IDLE_MS = 100
TICK_S = 0.5
GOODBYE_S = 2.0  # how long a supervised hub waits at the end for the last messages of its ranks
SUSPENDED_S = 2.0  # a hub that has not run for this long was suspended, or its machine was overloaded
# From this many frames in a round on, sleep REST_S so that the next round handles more frames.
BUSY_FRAMES = 8
REST_S = 0.01


class Hub:
    """One hub process. `run` returns after `stop`, or when the process `parent` has ended."""

    def __init__(
        self,
        run: str,
        folder: Path,
        endpoints: Endpoints,
        parent: int | None = None,
        notifier: Notifier | None = None,
        listen: Words[str] = (),
        keys: KeyStore | None = None,
        record: Limits | None = None,
        memory: MemoryLimit | None = None,
    ) -> None:
        self.outgrown = False  # whether the memory limit was exceeded, so that the process must restart
        self.run_name = run
        self.folder = folder
        self.endpoints = endpoints
        self._stopping = False
        self._began_s = time.time()
        first_hub = not (folder / runs.RECORD_FILE).exists()
        self._update_log = UpdateLog()
        self._peer_faults = PeerFaults(self._update_log)
        self._membership = Membership(run)
        self._journal = Journal(folder / runs.COMMANDS_FILE, folder / runs.RECORD_FILE)
        self._history = History(folder / runs.RECORD_FILE, self._update_log) if record else None
        self._recorder = Recorder(folder / runs.RECORD_FILE, self._update_log, record) if record else None
        self._control = Control(self._update_log, self._membership, self._journal)
        self._trials = Trials(self._update_log, self._control, self._journal)
        self._context = zmq.Context()
        self._sockets = ServerSockets(self._context, endpoints, listen, keys)
        self._preview_queries = PreviewQueries(self._update_log, self._membership, self._send)
        self._stack_queries = StackQueries(self._update_log, self._membership, self._sockets.send)
        self._ingest = Ingest(
            self._update_log,
            self._membership,
            self._control,
            self._peer_faults,
            self._preview_queries,
            self._stack_queries,
            first_hub,
        )
        self._sampling_leases = SamplingLeases()
        self._subscribers = Subscribers(self._update_log, self._sockets.send)
        self.self_repair = SelfRepair(folder, endpoints, self._sockets, self.file)
        requests = ClientRequests(
            self._subscribers,
            self._control,
            self._trials,
            self._preview_queries,
            self._sampling_leases,
            self._stack_queries,
        )
        self._frames = ReceivedFrames(self._sockets, self._ingest, requests, self._peer_faults)
        self._alerts = Alerts(
            self._update_log, self._peer_faults, notifier, self._stack_queries.explain_stall
        )
        self._run_end = RunEnd(
            folder, self._began_s, parent, self._membership, self._update_log, self._alerts
        )
        self._memory = memory
        self._served_s = 0.0
        self._ticked_s = 0.0
        self._active_s = 0.0  # seconds for which this process has run, without the time it was suspended
        self._round_s = time.monotonic()
        if self._journal.failure:
            self._log("error", clip(self._journal.failure))
        self._log_journal_problems()

    def stop(self) -> None:
        """Ask `run` to return; may be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop` or until the parent has ended; then remove the sockets and hub.json.

        If the memory limit is exceeded, `run` returns early (`outgrown`) and keeps the sockets and hub.json for the
        restarted process.
        """
        poller = zmq.Poller()
        for waited in (*self._sockets.waited_for, self._journal.wake_fd):
            poller.register(waited, zmq.POLLIN)
        more = False
        while not self._stopping:
            poller.poll(FLUSH_MS if more else IDLE_MS)
            more = self._round()
            if self._frames.count >= BUSY_FRAMES and not self._frames.cut_short:
                time.sleep(REST_S)
            self._check_memory()
        if self.outgrown:
            self._close_for_restart()
        else:
            self._finish()

    def _round(self) -> bool:
        """Receive and handle frames, and serve clients; returns True if there is more to send to clients."""
        now = time.monotonic()
        self._active_s += min(now - self._round_s, TICK_S)
        self._ingest.dropped.idle_s = max(self._ingest.dropped.idle_s, now - self._round_s)
        self._round_s = now
        self._sockets.admit()
        self._frames.drain_all(self._active_s)
        for written in self._journal.take():
            self._control.journal_wrote(written)
        self._send_command(now)
        self._stack_queries.turn(now)
        if self._active_s - self._ticked_s >= TICK_S:
            self._ticked_s = self._active_s
            self._tick()
        if now - self._served_s < FLUSH_MS / 1000:
            return True  # clients are served in a later round
        self._served_s = now
        self._control.publish_acks()
        if self._recorder:
            self._recorder.follow()
        return self._subscribers.serve(now)

    def _tick(self) -> None:
        for gone in self._membership.newly_lost(self._active_s):
            self._update_log.publish(gone)
            self._control.rank_lost(gone.rank)
            if gone.rank == self._membership.last_leader and gone.process == "ended":
                self._control.leader_ended(f"the leader, rank {gone.rank}, is gone")
        self._check_journal()
        self._control.publish_waiting()
        self._control.journal_counts()
        self._drop_unauthorized()
        for level, text in self.self_repair.check():
            self._log(level, clip(text))
        if self._history and self._history.tick(self._membership.last_leader):
            self._alerts.learn(self._active_s)
        self._trials.tick()
        self._ingest.report_heard_again()
        if dropped := self._ingest.dropped.take(SUSPENDED_S):
            self._update_log.publish(dropped)
        self._alerts.check(self._active_s)
        self._ingest.report_malformed()
        self._request_samples()
        if self._run_end.parent_ended:
            self.stop()

    def _check_journal(self) -> None:
        """Publish what the thread of the journal (the file with the run's commands and trials) reports, for example
        that the file was removed. If the journal's file could not be opened before but is open now, also load its
        commands and trials."""
        for event in self._journal.take_events():
            self._update_log.publish(event)
        if not self._journal.take_reopened():
            return
        self._control.load_journal()
        self._trials.load_journal()
        self._log_journal_problems()
        leader = self._membership.leader
        if leader:  # the start time in the published hello is on this machine's clock
            self._control.leader_began(self._update_log.state.hellos[leader.rank])

    def _log_journal_problems(self) -> None:
        for problem in self._journal.found.problems:
            self._log("warning", clip(f"commands of this run may be missing: {problem}"))

    def _drop_unauthorized(self) -> None:
        """Send a refusal to clients whose key was revoked, and drop them; report connections that could not be
        accepted, and errors of the authenticator, in the run's log."""
        for peer in [peer for peer in self._subscribers if self._sockets.role(peer) in (None, Role.RANK)]:
            self._subscribers.forget(peer)
            why = "the key of this connection is no longer valid for watching; ask the owner of the run for another key"
            self._sockets.answer(peer, codec.encode([Refused(why)]))
        if count := self._sockets.turned_away():
            text = f"this process has too many files open (ulimit -n): {count} connections were turned away"
            self._peer_faults.add("connection", text)
        while self._sockets.authenticator and self._sockets.authenticator.problems:
            self._peer_faults.add("connection", self._sockets.authenticator.problems.popleft())

    def _check_memory(self) -> None:
        excess = self._memory.excess() if self._memory else ""
        if excess and not self._stopping:
            self.outgrown = True
            self._log("error", excess)
            self.stop()

    def _close_for_restart(self) -> None:
        """Write the journal to disk, and close all files and sockets. The socket files and hub.json remain for the
        restarted process."""
        self._control.journal_counts()
        self._journal.flush()
        self._close()
        self._alerts.close()

    def _finish(self) -> None:
        """Handle the remaining frames, publish the end of the run, close all files and sockets, and remove the socket
        files and hub.json."""
        self._await_goodbyes()
        deadline = time.monotonic() + LEAVE_S
        while self._frames.drain_all(self._active_s) and time.monotonic() < deadline:
            pass
        over = self._run_end.reason()
        if over is not None:
            self._control.leader_ended(over)
        self._journal.flush()
        for written in self._journal.take():
            self._control.journal_wrote(written)
        self._control.publish_acks()
        self._control.journal_counts()
        if over is not None:
            self._trials.run_ended()
        self._run_end.publish()
        self._log("info", "the hub has ended")
        self._subscribers.end()
        while self._subscribers.serve(time.monotonic()) and time.monotonic() < deadline:
            pass
        self._close()
        remove_hub_file(self.folder, self._update_log.epoch)
        remove_sockets(self.endpoints)
        self._alerts.close()

    def _await_goodbyes(self) -> None:
        """Handle frames until every rank has left or ended, for at most `GOODBYE_S` seconds: if a supervised hub is
        ended, its job is over, but the last messages of ranks may be on the way. Any other hub may be ended while its
        ranks train on.
        """
        if not self._run_end.supervised:
            return
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and not self._membership.all_left():
            if not self._frames.drain_all(self._active_s):
                time.sleep(FLUSH_MS / 1000)

    def _close(self) -> None:
        self._journal.close()
        if self._history:
            self._history.close()
        if self._recorder:
            self._recorder.close()
        if self._memory:
            self._memory.close()
        self._sockets.close()
        self._context.term()

    def _send_command(self, now: float) -> None:
        command = self._control.next_command(now)
        leader = self._membership.leader if command else None
        if command and leader:
            self._send(self._membership.identity(leader.rank), command)

    def _send(self, peer: bytes, message: Message) -> None:
        self._sockets.send(peer, codec.encode([message]))

    def _request_samples(self) -> None:
        """Request samples from the ranks for which clients hold sampling leases."""
        step_ms = self._update_log.state.step_ms
        for peer, samples in self._sampling_leases.requests_due(
            self._membership.with_capability(SAMPLES), step_ms, time.monotonic()
        ):
            self._sockets.send(peer, codec.encode(samples))

    def _log(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._update_log.publish(Event(time.time(), level, "hub", text))

    def file(self) -> HubFile:
        """The content of `hub.json`. The sockets must be bound first."""
        return HubFile(
            run=self.run_name,
            epoch=self._update_log.epoch,
            endpoints=self.endpoints,
            pid=os.getpid(),
            wire=protocol.VERSION,
            started_s=self._began_s,
            host=this_host(),
            machine=this_machine(),
            start=process_start(os.getpid()),
            folder=folder_identity(self.folder),
            tcp=self._sockets.tcp,
        )
