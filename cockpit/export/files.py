"""Export to NDJSON, CSV and Parquet."""

import csv
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from agents.recording.reader import Recording
from cockpit.data import plain
from cockpit.export.tables import PLACE, blocks, columns
from cockpit.export.updates import simulated, updates


@contextmanager
def output(out: Path | None) -> Iterator[IO[str]]:
    """Context manager that opens the file `out`, or yields standard output if `out` is None."""
    if out is None:
        yield sys.stdout
        return
    with out.open("w", encoding="utf-8", newline="") as file:
        yield file


def to_ndjson(recording: Recording, out: Path | None) -> int:
    """Write one line per update, with every field by name; returns the number of updates."""
    count = 0
    mark = {"simulated": True} if simulated(recording) else {}
    with output(out) as file:
        for moment, update in updates(recording):
            place = dict(zip(PLACE, (moment.epoch, moment.seq, moment.time_s), strict=True))
            file.write(plain.to_json({**place, **plain.update(update), **mark}) + "\n")
            count += 1
    return count


def to_csv(recording: Recording, out: Path) -> int:
    """Write one file per table; a missing value is an empty cell. Returns the number of rows."""
    known = columns(recording)
    count = 0
    with ExitStack() as stack:
        writers: dict[str, csv.DictWriter[str]] = {}
        for table, block in blocks(recording, known):
            if table not in writers:
                file = stack.enter_context((out / f"{table}.csv").open("w", encoding="utf-8", newline=""))
                writers[table] = csv.DictWriter(file, list(known[table]))
                writers[table].writeheader()
            writers[table].writerows(block)
            count += len(block)
    return count


def to_parquet(recording: Recording, out: Path) -> int:
    """Write one file per table; a missing value is null. Returns the number of rows."""
    import pyarrow as pa
    from pyarrow import parquet

    # A column without values becomes text, because a Parquet column needs a type.
    kinds = {
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        str: pa.string(),
        type(None): pa.string(),
    }
    known = columns(recording)
    schemas = {
        table: pa.schema([(name, kinds[kind]) for name, kind in names.items()])
        for table, names in known.items()
    }
    count = 0
    with ExitStack() as stack:
        writers: dict[str, Any] = {}
        for table, block in blocks(recording, known):
            if table not in writers:
                path = out / f"{table}.parquet"
                writers[table] = stack.enter_context(parquet.ParquetWriter(path, schemas[table]))
            writers[table].write_table(pa.Table.from_pylist(block, schema=schemas[table]))
            count += len(block)
    return count
