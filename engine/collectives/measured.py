"""Selects the all-reduce algorithms of a run from the measurements in the hardware file that `run.collectives` names.
Torch-free."""

from pathlib import Path

from engine.collectives.parts import SENT
from engine.config.refusal import RefusedError
from engine.planner.hardware.description import MeasuredCollective
from engine.planner.hardware.table import load
from engine.planner.timing.measured import HIERARCHICAL, with_chosen

KIND = "all_reduce"
TORCH, DIRECT = "torch", "direct"  # torch's own all-reduce; one all-to-all of whole buffers


def chosen_all_reduces(path: str | Path, backend: str | None = None) -> tuple[MeasuredCollective, ...]:
    """Reads a hardware file and returns, for each measured group and buffer size, the all-reduce algorithm that was the
    fastest. Raises RefusedError if the file contains no measured all-reduce, if a measured all-reduce algorithm cannot
    be used, or if the measurements were made with a backend other than `backend`."""
    hardware = load(path)
    measured = hardware.measured
    known = {*SENT[KIND], HIERARCHICAL, TORCH, DIRECT}
    rows = [row for row in measured.algorithms if row.kind == KIND] if measured else []
    for row in rows:
        if row.algorithm not in known:
            raise RefusedError(
                f"run.collectives = {path}: all-reduce {row.algorithm} is not known; legal: {', '.join(sorted(known))}"
            )
        if row.algorithm == HIERARCHICAL and (not row.node or row.ranks % row.node):
            raise RefusedError(
                f"run.collectives = {path}: hierarchical over {row.ranks} ranks has node = {row.node}; "
                f"legal: a divisor of the ranks"
            )
    if not measured or not rows:
        raise RefusedError(
            f"run.collectives = {path} has no measured all-reduce; legal: a file that "
            "engine collectives --into FILE wrote"
        )
    if backend is not None and measured.backend != backend:
        raise RefusedError(
            f"run.collectives = {path} was measured on {measured.backend}, but this run uses {backend}; legal: a "
            f"file measured on {backend}"
        )
    fastest = with_chosen(hardware).measured
    assert fastest
    return tuple(row for row in fastest.collectives if row.kind == KIND)
