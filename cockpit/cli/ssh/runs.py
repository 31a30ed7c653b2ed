"""``cockpit runs ssh://HOST[/FOLDER]``: the list that ``cockpit runs`` prints on another machine."""

import os
import subprocess
import tempfile

from cockpit.cli.exit_status import DONE
from cockpit.cli.ssh.failures import REMOTE, failure
from cockpit.cli.ssh.target import parse
from cockpit.cli.ssh.tunnel import remote_command, ssh_program
from cockpit.data.sources.connection import CockpitError
from cockpit.printing import print_line

MOST_BYTES = 16 << 20
OPTIONS = ("ClearAllForwardings=yes", "RemoteCommand=none", "RequestTTY=no", "ConnectTimeout=20")


def remote_runs(url: str, as_json: bool) -> int:
    """Print the other machine's list of runs, without control characters. Raises CockpitError."""
    target = parse(url)
    words = ["runs", *(["--json"] if as_json else []), *([f"--dir={target.path}"] if target.path else [])]
    flags = [word for option in OPTIONS for word in ("-o", option)]
    command = [ssh_program(), *flags, *target.arguments(), remote_command(*words)]
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=messages
        ) as process,
    ):
        assert process.stdout
        printed = process.stdout.read(MOST_BYTES + 1)
        if len(printed) > MOST_BYTES:
            process.kill()
            raise CockpitError(f"the list of runs on {target.host} is longer than {MOST_BYTES >> 20} MiB")
        if status := process.wait():
            messages.seek(0)
            said = messages.read(MOST_BYTES).decode(errors="replace")
            raise CockpitError(failure(target, status, said, os.environ.get(REMOTE) or "cockpit"))
    for line in printed.decode(errors="replace").splitlines():
        if not as_json or line.startswith("{"):
            print_line(line)
    return DONE
