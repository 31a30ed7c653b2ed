"""`engine layouts`: lists the layouts in a folder, one line each."""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options
from engine.config.refusal import LayoutError
from engine.config.sizes import parameter_count
from engine.config.toml import load
from engine.layouts import PREFIX, shipped_folder

ABOUT = "list the layouts in a folder: path, parameters, ranks, description"
MOST = 1000  # files


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("layouts", help=ABOUT, description=ABOUT)
    parser.add_argument("folder", nargs="?", type=Path, help="default: ./layouts, else the shipped layouts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("layouts", rest)
    here = Path(PREFIX)
    folder = options.folder or (here if here.is_dir() else shipped_folder())
    if not folder.is_dir():
        refuse(f"there is no folder of layouts {folder}; legal: a folder with TOML files")
    if rest:
        refuse(f"engine layouts takes one folder; legal: leave out {rest[0]}")
    rows = list(_rows(folder))
    if options.json:
        print_text(f"{json.dumps(rows)}\n")
        return
    width = max((len(row["path"]) for row in rows), default=0)
    columns = shutil.get_terminal_size().columns
    print_text("".join(f"{_cut(row['path'].ljust(width) + _says(row), columns)}\n" for row in rows))


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each layout in a folder and its subfolders. TOML files that are not layouts are skipped."""
    shipped = shipped_folder()
    for path in sorted(folder.rglob("*.toml"), key=lambda p: (len(p.parts), p))[:MOST]:
        try:
            layout = load(path)
        except LayoutError:
            continue
        yield {
            "path": str(path if folder != shipped else Path(PREFIX) / path.relative_to(shipped)),
            "about": _first_sentence(path),
            "parameters": parameter_count(layout.model),
            "active_parameters": parameter_count(layout.model, active=True),
            "ranks": layout.ranks.world,
        }


def _says(row: dict[str, Any]) -> str:
    return f" {_short(row['parameters']):>6} {row['ranks']:>6,} ranks  {row['about']}"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


def _short(count: int) -> str:
    """A parameter count in the form used in model names, such as 671B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment at the top of a layout file."""
    words: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# ").strip())
    return " ".join(words).partition(". ")[0].partition(": ")[0].rstrip(".")
