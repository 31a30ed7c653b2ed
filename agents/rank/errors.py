"""Formats errors raised by the training program's own code, even if `str` or `repr` of the error fails."""


def sentence(error: BaseException) -> str:
    """The error's message, or the name of its type if the message is empty. UTF-8 can encode the result."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - foreign `__str__`
        text = ""
    return sendable(text) or type(error).__name__


def named(error: BaseException) -> str:
    """The error's `repr`, which includes its type."""
    try:
        return sendable(repr(error))
    except Exception:  # noqa: BLE001 - foreign `__repr__`
        return f"{type(error).__name__} (its repr fails)"


def sendable(text: str) -> str:
    """`text` with `?` in place of NUL, which would terminate a vote, and in place of characters that UTF-8 cannot
    encode, which file names may contain.
    """
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
