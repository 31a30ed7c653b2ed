"""CURVE keys: a private folder with key files and a list of the keys with their roles.

    hub.key        key of the hub, created when first needed
    NAME.key       key of a rank, viewer or operator, with the hub's public key: all that is needed to connect
    allowed.json   the keys made here, their roles and revocation times; hubs reread it when it changes

Keys are encoded in Z85, as in ZeroMQ. A public key identifies its holder; a secret key is never printed.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import platformdirs
from msgspec import Meta, Struct, structs

from agents.protocol.base import RunError
from agents.transport.addresses import Endpoints
from agents.transport.open_files import open_lock
from agents.transport.roles import Role

KEY_VARIABLE = "COCKPIT_KEY"  # environment variable with key files, separated as in PATH
FOLDER_VARIABLE = "COCKPIT_KEYS"  # the key folder
LIST_FILE = "allowed.json"
SHOWN = 20  # maximum number of names listed in an error
HUB = "hub"  # reserved name
LONGEST_KEY_FILE = 4096  # bytes
MOST_KEYS = 1024  # maximum number of keys that are not revoked
REVOKED_KEPT = 256  # number of revoked keys kept in the list; a key that is not in the list is also refused
LONGEST_LIST = 16 << 20  # bytes; a list is below 1 MiB, but an older release never removed revoked keys
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

KeyName = Annotated[str, Meta(pattern=f"^{_NAME.pattern}$", max_length=64)]
Z85Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class Key(Struct, frozen=True):
    """The content of a key file. The role in the file is only a label; the hub uses the role in its list."""

    name: KeyName
    role: str
    public: Z85Key
    secret: Z85Key
    hub: Z85Key  # public key of the hub that accepts it

    def __repr__(self) -> str:
        # Without the secret, so that no traceback shows it.
        return f"Key({self.name!r}, {self.role!r}, {self.public!r})"


class Listed(Struct, frozen=True):
    """An entry in the hub's list of keys: the public key, its name, its role, and when it was made and revoked."""

    name: KeyName
    role: Role
    public: Z85Key
    made_s: float
    revoked_s: float | None = None


def keys_folder() -> Path:
    """The folder in ``COCKPIT_KEYS`` if set, else ``cockpit/keys`` in the user's configuration folder. Raises RunError
    if there is no home directory.
    """
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    try:
        return platformdirs.user_config_path("cockpit") / "keys"
    except RuntimeError:  # in a container, a user id may have no passwd entry
        raise RunError(f"there is no home directory; name a folder of keys with {FOLDER_VARIABLE}") from None


def key_folder(endpoints: Endpoints) -> Path:
    """The folder in which to search for a key that the hub accepts: the hub's own key folder if this user can read it,
    else the default folder.
    """
    named = Path(endpoints.keys) if endpoints.keys else None
    return named if named and named.is_dir() and os.access(named, os.R_OK | os.X_OK) else keys_folder()


def load_key(path: Path) -> Key:
    """Read a key file. Raise RunError if the file is missing, not a key file, or readable by other users."""
    raw = _read_private(path, LONGEST_KEY_FILE)
    try:
        key = msgspec.json.decode(raw, type=Key)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RunError(
            f"{path} is not a key file; make one with cockpit keys make NAME --role ROLE"
        ) from None
    import zmq  # imported only when needed, so that launchers start fast

    if zmq.curve_public(key.secret.encode()) != key.public.encode():
        raise RunError(f"{path} is not a key file: its public and secret key do not match")
    return key


def find_key(
    roles: Sequence[Role], given: Path | None = None, folder: Path | None = None, hub: str = ""
) -> Key:
    """The key to use is `given` if this is set, else a key in ``COCKPIT_KEY``, else the first key in `folder` whose
    role is in `roles`.

    `roles` are in order of preference. Raises RunError if there is no key, if the key's role is not in `roles`, or if
    the key is for a hub whose public key is not `hub`.
    """
    named, passed_over = (given, "") if given else _named(roles)
    store = KeyStore(folder or keys_folder())
    path = named or next(store.files(roles), None)
    if path is None:
        raise RunError(
            f"this hub requires a key of role {' or '.join(roles)}, and there is none in {store.folder}{passed_over}; "
            f"name its file with --key or COCKPIT_KEY, or make one: cockpit keys make NAME --role {roles[0]}"
        )
    key = load_key(path)
    if key.role not in roles:
        raise RunError(
            f"{path} is a key of role {key.role}, but this connection needs one of role {' or '.join(roles)}"
        )
    if hub and key.hub != hub:
        raise RunError(f"{path} is a key for another hub; use one made in the hub's key folder")
    return key


def _named(roles: Sequence[Role]) -> tuple[Path | None, str]:
    """Which of the key files listed in ``COCKPIT_KEY`` to use (None if none fits), and a phrase that names all of them,
    for error messages. The variable may list keys for ranks and for clients: a client ignores rank keys, and a rank
    ignores client keys.
    """
    files = [Path(file) for file in os.environ.get(KEY_VARIABLE, "").split(os.pathsep) if file]
    found = [(file, load_key(file).role) for file in files]
    for_rank = Role.RANK in roles
    candidates = [(file, role) for file, role in found if (role == Role.RANK) is for_rank]
    fits = next((file for file, role in candidates if role in roles), None)
    others = ", ".join(f"{file} of role {role}" for file, role in found)
    return fits or (
        candidates[0][0] if candidates else None
    ), f" (COCKPIT_KEY names {others})" if others else ""


class KeyStore:
    """A key folder. The folder is created with the first key. A folder that other users can enter is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def listed(self) -> list[Listed]:
        """All valid keys and the most recently revoked keys, oldest key first. Raise RunError if other users can read
        or change the list.
        """
        if not self.folder.exists():
            return []
        _check_folder(self.folder)
        path = self.folder / LIST_FILE
        if not path.exists():
            return []
        try:
            return msgspec.json.decode(_read_private(path, LONGEST_LIST), type=list[Listed])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is not a list of keys: {error}") from None

    def files(self, roles: Sequence[Role]) -> Iterator[Path]:
        """The key files of all keys that have one of `roles` and are not revoked, in the order of `roles`."""
        in_force = [row for row in self.listed() if row.revoked_s is None]
        for role in roles:
            for row in in_force:
                if row.role is role and self.file(row.name).is_file():
                    yield self.file(row.name)

    def hub_key(self) -> Key:
        """The hub's own key; it is created if it does not exist."""
        with self._locked():
            path = self.file(HUB)
            if not path.exists():
                public, secret = _new_pair()
                _write_private(path, Key(HUB, HUB, public, secret, public))
            return load_key(path)

    def make(self, name: str, role: Role) -> Path:
        """Create a key, add it to the list, and return its file. Raises RunError if the name is in use or invalid, or
        if the folder already has `MOST_KEYS` valid keys.
        """
        if not _NAME.fullmatch(name) or name == HUB:
            raise RunError(
                f"a key cannot be named {name[:70]!r}; legal: letters, digits, '.', '_' and '-', and not {HUB}"
            )
        hub = self.hub_key().public
        with self._locked():
            listed = self.listed()
            if any(row.name == name and row.revoked_s is None for row in listed):
                raise RunError(f"the key {name} already exists; revoke it first, or choose another name")
            if sum(row.revoked_s is None for row in listed) >= MOST_KEYS:
                raise RunError(
                    f"{self.folder} already has {MOST_KEYS} keys in force, the limit; revoke one, or make "
                    f"the key in "
                    "another folder"
                )
            public, secret = _new_pair()
            path = self.file(name)
            _write_private(path, Key(name, role, public, secret, hub))
            self._write_list([*listed, Listed(name, role, public, time.time())])
        return path

    def revoke(self, name: str) -> Listed:
        """Revoke a key; running hubs stop accepting it within a second. Raise RunError if there is no such key or it is
        already revoked."""
        with self._locked():
            listed = self.listed()
            found = next((row for row in listed if row.name == name and row.revoked_s is None), None)
            if found is None:
                known = [row.name for row in listed if row.revoked_s is None]
                names = ", ".join(known[:SHOWN]) + (
                    f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
                )
                raise RunError(
                    f"there is no key {name[:70]} in force; the keys in force are: {names or 'none'}"
                )
            revoked = structs.replace(found, revoked_s=time.time())
            # The file is deleted before the list is written, so that even a full disk has room for the list.
            self.file(name).unlink(missing_ok=True)
            self._write_list([revoked if row is found else row for row in listed])
        return revoked

    def _write_list(self, rows: list[Listed]) -> None:
        """Write the list without the oldest revoked keys, so that its size is bounded."""
        revoked = sorted(row.revoked_s for row in rows if row.revoked_s is not None)[-REVOKED_KEPT:]
        kept = [row for row in rows if row.revoked_s is None or row.revoked_s >= revoked[0]]
        _write_private(self.folder / LIST_FILE, kept)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that only one process at a time writes to it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(self.folder)
            with open_lock(self.folder / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise RunError(f"the key folder {self.folder} cannot be used: {error.strerror}") from None


def _new_pair() -> tuple[str, str]:
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunError(f"the key folder {folder} must be a directory of yours with mode 0700 (chmod 700)")


def _read_private(path: Path, longest: int) -> bytes:
    """Read a private file. Raise RunError if the file is larger than `longest` bytes, or if other users can read or
    write the file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RunError(f"{path} is not a regular file")
            if found.st_mode & 0o077:
                raise RunError(
                    f"{path} can be read or written by other users; make it private: chmod 600 {path}"
                )
            raw = file.read(longest + 1)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > longest:
        raise RunError(f"{path} has more than {longest} bytes, the limit")
    return raw


def _write_private(path: Path, content: Key | list[Listed]) -> None:
    """Write a file atomically; other users can never read it."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
