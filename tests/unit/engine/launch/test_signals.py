"""Stop signals that arrive while ranks are forked."""

import signal
import threading
from pathlib import Path

import pytest

from engine.launch.processes.local_ranks import fork_ranks
from engine.launch.supervision.signals import Signals, StopNow
from engine.rendezvous import LastOperations, RankContext


def test_no_rank_is_forked_while_a_stop_signal_is_pending(tmp_path: Path) -> None:
    def work(context: RankContext) -> None:
        raise AssertionError("a rank was forked")

    with Signals() as signals, signals.blocked():
        # Send the signal to this thread, because other tests may leave threads that do not block it.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert signals.pending()
        with pytest.raises(StopNow):
            fork_ranks(3, work, None, tmp_path, LastOperations(3), signals)
    assert signals.stop == signal.SIGTERM
