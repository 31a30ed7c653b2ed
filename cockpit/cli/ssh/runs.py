"""``cockpit runs ssh://HOST[/FOLDER]``: the list that ``cockpit runs`` prints on another machine."""

import os
import subprocess

from cockpit.cli.exit_status import DONE
from cockpit.cli.ssh.failures import REMOTE, failure
from cockpit.cli.ssh.target import parse
from cockpit.cli.ssh.tunnel import remote_command, ssh_program
from cockpit.data.sources.connection import CockpitError
from cockpit.printing import print_line

MOST_BYTES = 16 << 20
OPTIONS = ("ClearAllForwardings=yes", "RemoteCommand=none", "RequestTTY=no", "ConnectTimeout=20")


def remote_runs(url: str, as_json: bool) -> int:
    """Print the lines of the other machine without control characters. Raises CockpitError."""
    target = parse(url)
    words = ["runs", *(["--json"] if as_json else []), *([f"--dir={target.path}"] if target.path else [])]
    flags = [word for option in OPTIONS for word in ("-o", option)]
    done = subprocess.run(
        [ssh_program(), *flags, *target.arguments(), remote_command(*words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        printed = done.stderr.decode(errors="replace")
        command = os.environ.get(REMOTE) or "cockpit"
        raise CockpitError(failure(target, done.returncode, printed, command))
    for line in done.stdout[:MOST_BYTES].decode(errors="replace").splitlines():
        if not as_json or line.startswith("{"):
            print_line(line)
    return DONE
