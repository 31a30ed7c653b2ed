"""Makes the folder of a run."""

from pathlib import Path

from agents.rundir.runs import RunError


def make_folder(chosen: Path | None, named: Path, what: str = "the run's folder") -> Path:
    """The folder that was chosen, or a new one."""
    folder = chosen or named
    try:
        # Two runs may begin in one second.
        for again in range(2, 100):
            try:
                folder.mkdir(parents=True, exist_ok=chosen is not None)
                break
            except FileExistsError:
                if chosen is not None:
                    raise
                folder = named.with_name(f"{named.name}-{again}")
    except OSError as error:
        raise RunError(f"{what} {folder} cannot be made: {error.strerror}") from None
    return folder
