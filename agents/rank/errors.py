"""Formats errors raised by the training program's own code, even if `str` or `repr` of the error fails."""


def sentence(error: BaseException) -> str:
    """The error's message, or the name of its type if the message is empty. The result can be encoded as UTF-8."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - foreign `__str__`
        text = ""
    return sendable(text) or type(error).__name__


def named(error: BaseException) -> str:
    """The `repr` of the error, which includes the name of the error's type."""
    try:
        return sendable(repr(error))
    except Exception:  # noqa: BLE001 - foreign `__repr__`
        return f"{type(error).__name__} (its repr fails)"


def sendable(text: str) -> str:
    """`text` with `?` in place of each character that cannot be sent. NUL cannot be sent because the engine pads votes
    with NUL; file names may contain characters that UTF-8 cannot encode.
    """
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
