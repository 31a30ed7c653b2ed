"""Runs test cases in batches: each process runs one batch, and the batches of a test file run in parallel."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.program import run as run_program

SIZE = 4  # maximum number of cases in a batch


def batched(subject: str, names: Sequence[str], quick: Collection[str]) -> dict[str, str]:
    """Distribute the test cases in `names` over batches; returns the name of each case's batch. A batch contains either
    only cases in `quick` or none of them, so that `make test` runs no slow case."""
    batches = {}
    for kind, of_kind in (
        ("quick", [name for name in names if name in quick]),
        ("exhaustive", [name for name in names if name not in quick]),
    ):
        count = -(-len(of_kind) // SIZE)
        batches |= {name: f"{subject} {kind} {n % count}" for n, name in enumerate(of_kind)}
    return batches


def marked(names: Sequence[str], batches: dict[str, str]) -> list[Any]:
    """The test cases as pytest parameters. All cases of a batch have the same xdist group."""
    parameters = []
    for name in names:
        marks = [pytest.mark.xdist_group(batches[name])]
        marks += [pytest.mark.exhaustive] if "exhaustive" in batches[name] else []
        parameters.append(pytest.param(name, marks=marks, id=name))
    return parameters


def runner(
    module: str,
    batches: dict[str, str],
    folder_of: Callable[[str], Path],
    timeout_s: float,
    options: Sequence[str] = (),
) -> Callable[[str], Path]:
    """Returns a function that takes the name of a test case and returns the folder with the results of the case. If the
    batch that contains the case has not run yet, the function first runs this batch with `python -m MODULE OPTIONS ...
    FOLDER CASE ...`."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        batch = batches[name]
        if batch not in done:
            names = [other for other, its_batch in batches.items() if its_batch == batch]
            folder = folder_of(batch.replace(" ", "-"))
            words = ("-W", "ignore", "-m", module, *options, str(folder), *names)
            ended = run_program(*words, timeout=timeout_s)
            assert ended.returncode == 0, ended.stderr[-4000:]
            done[batch] = folder
        return done[batch] / name

    return run
