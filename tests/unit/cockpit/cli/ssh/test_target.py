"""What an ``ssh://`` URL may contain, and the error message for each way in which ssh can fail."""

import pytest

from cockpit.cli.ssh.failures import REMOTE, failure, forwarding_failure
from cockpit.cli.ssh.target import parse
from cockpit.cli.ssh.tunnel import remote_command, remote_end
from cockpit.data.sources.connection import CockpitError


@pytest.mark.parametrize(
    ("url", "arguments", "path"),
    [
        ("ssh://node", ["--", "node"], None),
        ("ssh://node/", ["--", "node"], None),
        ("ssh://node/demo-1", ["--", "node"], "demo-1"),
        (
            "ssh://ann@login.hpc.example:2222/demo-1",
            ["-l", "ann", "-p", "2222", "--", "login.hpc.example"],
            "demo-1",
        ),
        ("ssh://node/scratch/ann/runs/demo-1", ["--", "node"], "/scratch/ann/runs/demo-1"),
        ("ssh://node/~/runs/demo-1", ["--", "node"], "runs/demo-1"),
        ("ssh://node/~/.runs/a_b+c", ["--", "node"], ".runs/a_b+c"),
        ("ssh://[fe80::1%eth0]/x", ["--", "fe80::1%eth0"], "x"),
    ],
)
def test_a_url_names_user_host_port_and_run(url: str, arguments: list[str], path: str | None) -> None:
    target = parse(url)
    assert (target.arguments(), target.path) == (arguments, path)


@pytest.mark.parametrize(
    "url",
    [
        "ssh://",
        "ssh:///demo",
        "ssh://-oProxyCommand=touch/x",
        "ssh://-l@node/x",
        "ssh://ann@-node/x",
        "ssh://a@b@node/x",
        "ssh://node:0/x",
        "ssh://node:65536/x",
        "ssh://node:22x/x",
        "ssh://node/-x",
        "ssh://node/a/-x",
        "ssh://node/../x",
        "ssh://node/a/..",
        "ssh://node/./x",
        "ssh://node//etc",
        "ssh://node/a;b",
        "ssh://node/$(id)",
        "ssh://node/`id`",
        "ssh://node/a b",
        "ssh://node/a\nb",
        "ssh://node/x\n",
        "ssh://node/a'b",
        "ssh://node/a*",
        "ssh://node/~ann/x",
        "ssh://nod\N{LATIN SMALL LETTER E WITH ACUTE}/x",
        "ssh://node/" + "a" * 2000,
    ],
)
def test_a_url_cannot_contain_an_option_or_a_shell_word(url: str) -> None:
    with pytest.raises(CockpitError, match="legal"):
        parse(url)


@pytest.mark.parametrize("command", ["-x", "cockpit; id", "$HOME/cockpit", "a b", "cockpit\n"])
def test_the_remote_command_is_a_path(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REMOTE, command)
    with pytest.raises(CockpitError, match="COCKPIT_REMOTE"):
        remote_command("where")


@pytest.mark.parametrize(
    "url",
    ["ipc://relative", "ipc:///a:b", "ipc:///a b", "ipc:///a\n", "http://x", "tcp://*:5", "tcp://a:b:5", ""],
)
def test_only_a_socket_or_an_address_is_forwarded(url: str) -> None:
    with pytest.raises(CockpitError, match="not the socket of a hub"):
        remote_end(url)


def test_sockets_and_addresses_are_forwarded() -> None:
    assert remote_end("ipc:///run/user/1000/cockpit-x1/clients") == "/run/user/1000/cockpit-x1/clients"
    assert remote_end("tcp://10.0.0.1:5555") == "10.0.0.1:5555"
    assert remote_end("tcp://[fe80::1]:5555") == "[fe80::1]:5555"


UNVERIFIED = "Host key verification failed."


# What OpenSSH 9.2 prints.
@pytest.mark.parametrize(
    ("status", "printed", "expected"),
    [
        (255, f"No ED25519 host key is known for node.\n{UNVERIFIED}", "not known here"),
        (255, f"@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!  @\n{UNVERIFIED}", "has changed"),
        (255, "ann@node: Permission denied (publickey).", "refused the login as ann"),
        (255, "ssh: Could not resolve hostname node: Name or service not known", "there is no host node"),
        (255, "ssh: connect to host node port 22: Connection refused", "does not accept ssh connections"),
        (255, "ssh: connect to host node port 22: Connection timed out", "does not answer"),
        (255, "kex_exchange_identification: read: Connection reset by peer", "ssh ann@node failed: kex_exchange"),
        (127, "bash: line 1: cockpit: command not found", "has no command cockpit"),
        (2, "there is no run x in runs; the runs there are: a", "on node: there is no run x"),
        (2, "argument command: invalid choice: 'where' (choose from attach) (see cockpit --help)", "earlier release"),
        (255, "", "no message"),
    ],
)  # fmt: skip
def test_each_failure_has_a_sentence(status: int, printed: str, expected: str) -> None:
    sentence = failure(parse("ssh://ann@node/x"), status, printed, "cockpit")
    assert expected in sentence
    assert "\n" not in sentence


def test_a_failure_shows_no_control_characters() -> None:
    assert "\x1b" not in failure(parse("ssh://node/x"), 1, "\x1b]0;title\x07bad", "cockpit")


def test_a_server_that_forwards_nothing_is_named() -> None:
    printed = "channel 2: open failed: administratively prohibited: open failed"
    assert "AllowStreamLocalForwarding" in forwarding_failure(parse("ssh://node/x"), printed)
