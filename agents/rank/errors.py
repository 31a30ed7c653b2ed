"""Errors of code that is not ours, as text: their `str` and `repr` are such code too, and may fail."""


def sentence(error: BaseException) -> str:
    """What the error says, else the name of its type; never empty, and any socket takes it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` is not ours
        text = ""
    return _sendable(text) or type(error).__name__


def named(error: BaseException) -> str:
    """The error with its type, as `repr` gives it."""
    try:
        return _sendable(repr(error))
    except Exception:  # noqa: BLE001 - `__repr__` is not ours
        return f"{type(error).__name__} (its repr fails)"


def _sendable(text: str) -> str:
    """Without what UTF-8 has no bytes for (file names of another encoding), and without NUL, which ends a vote."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
