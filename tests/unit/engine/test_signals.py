"""Stop signals while ranks are being forked."""

import os
import signal
from pathlib import Path

import pytest

from engine.launch import _fork
from engine.place import Place, Whereabouts
from engine.signals import Signals, StopNow


def test_no_rank_is_forked_once_a_stop_waits(tmp_path: Path) -> None:
    def work(place: Place) -> None:
        raise AssertionError("a rank was forked")

    with Signals() as signals, signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.waiting()
        with pytest.raises(StopNow):
            _fork(3, work, None, tmp_path, Whereabouts(3), signals)
    assert signals.stop == signal.SIGTERM
