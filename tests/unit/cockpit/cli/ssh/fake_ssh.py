"""Stands in for the program ssh: runs the remote command on this machine, and forwards Unix sockets on request.

As with the real ssh, a process started with ControlMaster serves a control socket, and another one with `-O forward`
asks it to forward a socket. Each command line is appended to the file FAKE_SSH_LOG. The environment variables
FAKE_SSH_PRINTS and FAKE_SSH_STATUS make the login fail, and FAKE_SSH_PROHIBITS makes the server refuse to forward
sockets.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

FLAGS = {"-o", "-l", "-p", "-F", "-S", "-O", "-L"}


def parse(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while words and words[0] != "--":
        assert words[0] in FLAGS, words
        options.setdefault(words[0], []).append(words[1])
        words = words[2:]
    return options, words[1:]


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def forward(local: str, remote: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(local)
    listener.listen()

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            try:
                assert "FAKE_SSH_PROHIBITS" not in os.environ
                far.connect(remote)
            except (OSError, AssertionError):
                sys.stderr.write("channel 3: open failed: administratively prohibited: open failed\n")
                sys.stderr.flush()
                near.close()
                continue
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def serve_control(path: str) -> None:
    control = socket.socket(socket.AF_UNIX)
    control.bind(path)
    control.listen()

    def accept() -> None:
        while True:
            peer, _ = control.accept()
            local, _, remote = peer.recv(4096).decode().partition(":")
            forward(local, remote)
            peer.sendall(b"ok")
            peer.close()

    threading.Thread(target=accept, daemon=True).start()


def main() -> int:
    with Path(os.environ["FAKE_SSH_LOG"]).open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    options, rest = parse(sys.argv[1:])
    if "-O" in options:
        request = socket.socket(socket.AF_UNIX)
        request.connect(options["-S"][0])
        request.sendall(options["-L"][0].encode())
        return 0 if request.recv(2) == b"ok" else 255
    if "FAKE_SSH_PRINTS" in os.environ:
        sys.stderr.write(os.environ["FAKE_SSH_PRINTS"] + "\n")
        return int(os.environ.get("FAKE_SSH_STATUS", "255"))
    path = next((one.partition("=")[2] for one in options["-o"] if one.startswith("ControlPath=")), None)
    if path:
        serve_control(path)
    return subprocess.run(["sh", "-c", " ".join(rest[1:])], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
