"""Marks that the user sets: a name and a note at a step. The marks are drawn on the curves and stored in the run's
folder.

If the folder cannot be written or is on another machine, marks last until this cockpit exits. Another user may have
written the file, so every value in it is validated.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from agents.rundir.bounded_read import read_ordinary
from agents.transport.open_files import replace_file
from cockpit.data.format import clean

FILE = "marks.json"
MOST = 256
MOST_NAME, MOST_NOTE = 16, 200
MOST_BYTES = 256 << 10
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_NAME}}}")


class NamedMark(Struct, frozen=True):
    """A step that the user has marked, with a name and a note."""

    name: Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
    step: Annotated[int, Meta(ge=0, le=2**53)]
    note: Annotated[str, Meta(max_length=MOST_NOTE)] = ""

    @property
    def text(self) -> str:
        """The mark as text: a single quote, its name and its note, such as ``'a the loss jumped``."""
        return f"'{self.name} {self.note}".rstrip()


class _File(Struct, frozen=True):
    marks: Annotated[list[NamedMark], Meta(max_length=MOST)]


class MarkError(ValueError):
    """Raised if a mark cannot be set; the message is one sentence."""


class NamedMarks:
    """The steps of a run that the user has marked. `note`: why the marks are kept only in memory; "" if they are kept
    in a file."""

    def __init__(self) -> None:
        self._marks: dict[str, NamedMark] = {}
        self._path: Path | None = None
        self.note = "the run's folder is not on this machine: marks last until this cockpit exits"

    def open(self, folder: Path) -> None:
        """Read the marks that are stored in `folder`, and store marks there from now on."""
        self._path, self.note = folder / FILE, ""
        self._read()

    def set(self, name: str, step: int, note: str = "") -> NamedMark:
        """Set a mark at `step`. If a mark with this name exists, it moves to `step`. Raises MarkError."""
        if not _NAME.fullmatch(name):
            raise MarkError(
                f"a mark's name has 1 to {MOST_NAME} letters, digits, - or _; not {clean(name)[:24]!r}"
            )
        self._read()
        if name not in self._marks and len(self._marks) >= MOST:
            raise MarkError(f"there are already {MOST} marks: move one by setting it again, or remove one")
        mark = self._marks[name] = _cleaned(NamedMark(name, step, note[:MOST_NOTE]))
        self._save()
        return mark

    def remove(self, name: str) -> bool:
        """Remove a mark. Returns False if there is no mark with this name."""
        self._read()
        if self._marks.pop(name, None) is None:
            return False
        self._save()
        return True

    def get(self, name: str) -> NamedMark | None:
        return self._marks.get(name)

    def __iter__(self) -> Iterator[NamedMark]:
        return iter(sorted(self._marks.values(), key=lambda mark: (mark.step, mark.name)))

    def __len__(self) -> int:
        return len(self._marks)

    def free_name(self) -> str:
        """The first letter of the alphabet that no mark has as its name, proposed for the next mark."""
        return next((one for one in "abcdefghijklmnopqrstuvwxyz" if one not in self._marks), "")

    def _read(self) -> None:
        """Read the file, because another cockpit may have set marks too."""
        if self._path is None or self.note:
            return
        try:
            found = msgspec.json.decode(read_ordinary(self._path, MOST_BYTES), type=_File).marks
        except FileNotFoundError:
            found = []
        except OSError as error:
            self._fail(f"{self._path} cannot be read: {error.strerror}")
            return
        except msgspec.DecodeError as error:
            self._fail(f"{self._path} is not a file of marks: {error}")
            return
        self._marks = {mark.name: _cleaned(mark) for mark in found if _NAME.fullmatch(mark.name)}

    def _save(self) -> None:
        """Write a temporary file and rename it, so that a reader never sees a partial file."""
        if self._path is None or self.note:
            return
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(_File(list(self)))))
        except OSError as error:
            self._fail(f"{self._path} cannot be written: {error.strerror}")

    def _fail(self, why: str) -> None:
        """Keep the marks only in memory from now on, so that a file that could not be read is not overwritten."""
        self.note = f"{clean(why)}: marks last until this cockpit exits"


def _cleaned(mark: NamedMark) -> NamedMark:
    return structs.replace(mark, note=clean(mark.note).strip())
