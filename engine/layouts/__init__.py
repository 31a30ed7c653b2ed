"""The layouts (descriptions of runs) and simulation scenarios that come with the package. In a checkout these files are
in `layouts/`; in an installed package they are next to this module. A file is found by path (`layouts/demo.toml`) or by
name (`demo`, `deepseek-v3`), from any working directory.
"""

import os
from collections.abc import Sequence
from pathlib import Path

PREFIX = "layouts"
LAYOUTS = ("", "frontier")  # folders of layouts
SCENARIOS = ("scenarios",)
_INSTALLED = Path(__file__).parent
_CHECKOUT = _INSTALLED.parents[1] / PREFIX


def shipped_folder() -> Path:
    """The folder of the layouts that come with the package."""
    return _INSTALLED if (_INSTALLED / "demo.toml").is_file() else _CHECKOUT


def names(folders: Sequence[str] = LAYOUTS) -> list[str]:
    """Names of the files that come with the package in `folders`."""
    return [path.stem for folder in folders for path in sorted((shipped_folder() / folder).glob("*.toml"))]


def find(name: str | Path, folders: Sequence[str] = LAYOUTS) -> Path | None:
    """The file that `name` refers to: an existing file, a shipped file with this path, or a shipped file with this name
    in `folders`. None if no such file exists."""
    # The file may also be a pipe or a device, which the reader opens or refuses.
    if os.path.exists(name) and not os.path.isdir(name):
        return Path(name)
    path = Path(name)
    if path.parts[:1] == (PREFIX,):
        places = [shipped_folder().joinpath(*path.parts[1:])]
    elif str(name) in names(folders):
        places = [shipped_folder() / folder / f"{name}.toml" for folder in folders]
    else:
        return None
    return next((place for place in places if os.path.isfile(place)), None)
