"""Where a hub sends alerts: to a command or to a URL."""

import shlex
import urllib.parse
from pathlib import Path
from typing import NamedTuple

from agents.protocol.base import RunError

SLACK = "slack+"  # before a URL: send messages of Slack's format
LEGAL = "a command, http(s)://HOST/PATH, or slack+https://HOST/PATH"


class AlertTarget(NamedTuple):
    """Where a hub sends alerts. For each alert, the hub runs the command `words` and passes the alert to its standard
    input or, if `post` is set, posts the alert to the URL `words[0]`. Messages name the target by `shown`, which is
    only the host if the target is a URL: a URL may contain a secret, and every client can read the log.
    """

    words: list[str]
    post: bool
    slack: bool
    shown: str


def alert_target(text: str) -> AlertTarget:
    """Parse the target. Raises RunError if `text` is neither an http(s) URL (optionally prefixed with `SLACK`) nor a
    command line.
    """
    url = text.removeprefix(SLACK)
    slack = url != text
    if slack or url.startswith(("http://", "https://")):
        try:
            parts = urllib.parse.urlsplit(url)
            host = parts.hostname
        except ValueError as error:
            raise RunError(f"the URL for alerts cannot be read ({error}); legal: {LEGAL}") from None
        if not host or parts.scheme not in ("http", "https"):
            raise RunError(f"{text} names no host to send alerts to; legal: {LEGAL}")
        return AlertTarget([url], True, slack, host)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RunError(f"the command for alerts cannot be read ({error}): {text}") from None
    if not words:
        raise RunError(f"the command for alerts is empty; legal: {LEGAL}")
    scheme, of_a_url, _ = words[0].partition("://")
    if of_a_url:
        raise RunError(f"alerts cannot be sent to a URL that begins with {scheme}://; legal: {LEGAL}")
    return AlertTarget(words, False, False, Path(words[0]).name)
