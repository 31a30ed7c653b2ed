"""`agents.join`: connects a training loop to a hub, so that the cockpit can show and steer it like any other run."""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from agents.loop.coordinates import Axes, coordinates
from agents.loop.loop import Loop, check_sendable
from agents.loop.start_hub import endpoint_for, is_first_on_machine
from agents.loop.vote import Agree
from agents.protocol import VERSION, Hello, Value
from agents.protocol.base import RunError
from agents.rank.provenance import provenance
from agents.rank.sensors.vitals import Sensors
from agents.rank.vote import LEADER
from agents.rundir.local_machine import process_start, this_host, this_machine
from agents.rundir.standard_streams import patiently

log = logging.getLogger("agents")


def join(
    run: str,
    rank: int = 0,
    world: int = 1,
    axes: Axes | None = None,
    agree: Agree | None = None,
    *,
    hub: str = "auto",
    run_dir: str | Path | None = None,
    device: str | int | None = None,
    layout: str = "",
    facts: Mapping[str, Value] | None = None,
    host: str | None = None,
    first_step: int = 0,
) -> Loop:
    """Connect to the run's hub as one rank of the run. All ranks call this function, with the same `run`, `world`,
    `run_dir` and `layout`.

    `axes`: this rank's coordinates, such as ``{"dp": 3, "tp": 0}``, or a torch `DeviceMesh` of all ranks with named
    axes. `agree`: an all-gather of bytes, which all ranks call in this function and at every step. Without `agree`,
    knobs are available only if `world` is 1. `hub` is "auto" (rank 0 starts a hub on its machine), "none", or the name
    or URL of an existing hub. `device`: the UUID of this rank's GPU, or its CUDA index in this process. `facts`:
    properties of the run, by name, which the cockpit shows beside the metrics. `host`: the machine on which the
    training runs, if this process only forwards the records of another program; nothing is then reported about this
    process. `first_step`: the number of the first training step, 0 or 1, from which clients count the completed steps.

    Raises ValueError if an argument is invalid, or if `hub` names a hub that cannot be found. With `hub` = "auto", the
    loop runs without a hub if none can be started.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank = {rank} of world = {world} is not legal; legal: 0 to world - 1")
    if not 0 < len(run) <= 64:
        raise ValueError("a run's name has 1 to 64 characters")
    if first_step not in (0, 1):
        raise ValueError(f"first_step = {first_step} is not legal; legal: 0 or 1")
    forwards = host is not None
    about = {} if rank != LEADER or forwards else provenance(Path(run_dir) if run_dir else None)
    hello = Hello(
        version=VERSION,
        run=run,
        rank=rank,
        world=world,
        coords=coordinates(axes),
        host=this_host() if host is None else host,
        pid=os.getpid(),
        device="" if device is None else str(device),
        layout=layout or "-",
        revision=0,
        step=0,
        leader=rank == LEADER,
        facts=about | dict(facts or {}),
        began_s=time.time(),
        first_step=first_step,
        machine="" if forwards else this_machine(),
        process_start=process_start(os.getpid()),
    )
    check_sendable(hello)
    stack = ExitStack()
    reached = None
    try:
        reached = endpoint_for(stack, hub, run, Path(run_dir) if run_dir else None, rank, world, agree)
    except RunError as error:
        if hub != "auto":
            raise
        patiently(partial(log.warning, "the run has no hub: %s", error))
    except Exception as error:  # noqa: BLE001 - a full disk or a failed collective must not end the program
        patiently(partial(log.error, "the run has no hub", exc_info=error))
    sensors = Sensors(device, host=is_first_on_machine() and not forwards, process=not forwards)
    return Loop(hello, reached, agree, sensors, stack)
