"""Error messages for failed ssh connections, chosen by the output and the exit status of ssh. Each message is
one sentence."""

from cockpit.cli.ssh.target import SshTarget
from cockpit.data.format import clean

SSH_FAILED = 255  # ssh's own exit status; any other one is that of the remote command
NOT_FOUND = (126, 127)  # exit status of a shell that cannot run a command
REMOTE = "COCKPIT_REMOTE"  # environment variable: the command `cockpit` on the other machine
NO_SSH = "this needs ssh (OpenSSH's client), and there is no program ssh on the PATH"
LONGEST = 300  # characters of a quoted line

# What ssh prints, in lower case, and the sentence; the first match counts. {login} is USER@HOST.
_CAUSES = (
    (
        "remote host identification has changed",
        "the host key of {host} has changed since the last connection: another machine may be answering; ask its "
        "administrator, then connect once with: ssh {login}",
    ),
    (
        "host key verification failed",
        "the host key of {host} is not known here; check it and accept it once with: ssh {login}",
    ),
    (
        "permission denied",
        "{host} refused the login as {user}: {line}; check with: ssh {login}",
    ),
    (
        "too many authentication failures",
        "{host} refused the login as {user}: {line}; name one key with IdentityFile in ~/.ssh/config",
    ),
    ("could not resolve hostname", "there is no host {host}: {line}"),
    ("connection refused", "{host} does not accept ssh connections: {line}"),
    ("timed out", "{host} does not answer: {line}"),
    ("no route to host", "{host} cannot be reached: {line}"),
    ("bad configuration option", "ssh refuses its configuration: {line}"),
)
# OpenSSH's server prints the same for a socket that it may not forward and for one that nobody listens on.
FORWARDING = (
    "the ssh server of {host} does not forward the hub's socket (AllowStreamLocalForwarding or AllowTcpForwarding in "
    "its sshd_config), or the hub has just ended; without forwarding: ssh -t {login} cockpit"
)


def failure(target: SshTarget, status: int, printed: str, command: str) -> str:
    """Why the remote command did not start or did not answer."""
    lines = [clean(line).strip()[:LONGEST] for line in printed.splitlines()]
    lines = [line for line in lines if line]
    last = lines[-1] if lines else "no message"
    if status in NOT_FOUND:
        return (
            f"{target.host} has no command {command} for a non-interactive shell ({last}); install train-cockpit "
            f"there, or name its path there in {REMOTE}, such as {REMOTE}=venv/bin/cockpit"
        )
    if status != SSH_FAILED:
        if "invalid choice: 'where'" in printed:
            return f"the cockpit on {target.host} is an earlier release, which cannot be reached by ssh://; update it"
        return f"on {target.host}: {last}"
    for text, sentence in _CAUSES:
        line = next((line for line in lines if text in line.lower()), None)
        if line is not None:
            return _filled(sentence, target, line)
    return f"ssh {target.login} failed: {last}"


def forwarding_failure(target: SshTarget, printed: str) -> str:
    """Why the hub does not answer at the forwarded socket."""
    lines = [clean(line).strip()[:LONGEST] for line in printed.splitlines() if "open failed" in line]
    if any("prohibited" in line or "connect failed" in line for line in lines):
        return _filled(FORWARDING, target, "")
    cause = f": {lines[-1]}" if lines else ""
    return f"the hub on {target.host} does not answer through ssh{cause}"


def _filled(sentence: str, target: SshTarget, line: str) -> str:
    user = target.user or "the user of ssh's configuration"
    return sentence.format(host=target.host, login=target.login, user=user, line=line)
