"""Creates the folder of a run."""

from pathlib import Path

from agents.rundir.runs import RunError, check_path


def make_folder(chosen: Path | None, named: Path, what: str = "the run's folder") -> Path:
    """Create a folder and return its path. If `chosen` is given, use that folder, which may already exist. Otherwise
    create a new folder with the name `named`; if that name is taken, add a number to it.
    """
    folder = chosen or named
    check_path(folder, what)
    try:
        # Two runs may start in the same second and so have the same name.
        for again in range(2, 100):
            try:
                folder.mkdir(parents=True, exist_ok=chosen is not None)
                break
            except FileExistsError:
                if chosen is not None:
                    raise
                folder = named.with_name(f"{named.name}-{again}")
    except OSError as error:
        raise RunError(f"cannot create {what} {folder}: {error.strerror}") from None
    return folder
