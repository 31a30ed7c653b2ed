"""CURVE keys: a private folder of key files, and the list that says what each key may do.

    hub.key        the hub's own; made when first needed
    NAME.key       a rank's, viewer's or operator's, with the hub's public key in it: all that is needed to connect
    allowed.json   the keys made here, their roles, and when they were revoked; hubs reread it as it changes

Keys are in Z85, as ZeroMQ writes them. A public key says who it is; a secret key is never printed.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from agents.protocol.base import RunError
from agents.transport.addresses import Endpoints
from agents.transport.open_files import open_lock

KEY_VARIABLE = "COCKPIT_KEY"  # names key files, as PATH does folders
FOLDER_VARIABLE = "COCKPIT_KEYS"  # names the folder of keys
LIST_FILE = "allowed.json"
SHOWN = 20  # names in an error
HUB = "hub"  # the name that no other key may have
LONGEST_KEY_FILE = 4096  # bytes
MOST_KEYS = 1024  # in force
REVOKED_KEPT = 256  # the newest; a key on no list is refused like a revoked one
LONGEST_LIST = 16 << 20  # bytes; what is written here has less than 1 MiB, an older release pruned nothing
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

KeyName = Annotated[str, Meta(pattern=f"^{_NAME.pattern}$", max_length=64)]
Z85Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class Role(StrEnum):
    """What a key may do: report as a rank; watch; watch and change knobs."""

    RANK = "rank"
    VIEWER = "viewer"
    OPERATOR = "operator"


class Key(Struct, frozen=True):
    """A key file. Its role is a label: what counts is the list that the hub reads."""

    name: KeyName
    role: str
    public: Z85Key
    secret: Z85Key
    hub: Z85Key  # the public key of the hub it is for

    def __repr__(self) -> str:
        return f"Key({self.name!r}, {self.role!r}, {self.public!r})"  # no traceback shows the secret


class Listed(Struct, frozen=True):
    """A row of the list of keys."""

    name: KeyName
    role: Role
    public: Z85Key
    made_s: float
    revoked_s: float | None = None


def keys_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``COCKPIT_KEYS``, else ``cockpit/keys`` in the user's configuration; RunError if there is no such place."""
    if named := environ.get(FOLDER_VARIABLE):
        return Path(named)
    if configuration := environ.get("XDG_CONFIG_HOME"):
        return Path(configuration) / "cockpit" / "keys"
    try:
        return Path.home() / ".config" / "cockpit" / "keys"
    except RuntimeError:  # a container's user without a name
        raise RunError(f"there is no home directory; name a folder of keys with {FOLDER_VARIABLE}") from None


def key_folder(endpoints: Endpoints) -> Path:
    """Where to look for a key to a hub: where it has its own, if that is seen here, else in the usual place."""
    named = Path(endpoints.keys) if endpoints.keys else None
    return named if named and named.is_dir() and os.access(named, os.R_OK | os.X_OK) else keys_folder()


def load_key(path: Path) -> Key:
    """The key in a file; RunError if there is none, or if it is no secret."""
    raw = _read_private(path, LONGEST_KEY_FILE)
    try:
        key = msgspec.json.decode(raw, type=Key)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RunError(f"{path} is not a key file; cockpit keys make NAME --role ROLE makes one") from None
    import zmq  # a launcher that meets no key does without it

    if zmq.curve_public(key.secret.encode()) != key.public.encode():
        raise RunError(f"{path} is not a key file: its two halves do not belong together")
    return key


def find_key(
    roles: Sequence[Role], given: Path | None = None, folder: Path | None = None, hub: str = ""
) -> Key:
    """The file `given`, else a key that ``COCKPIT_KEY`` names, else the first of `folder` with one of `roles`.

    `roles` are in order of preference. RunError: there is none, or it is of another role, or not for the hub of public
    key `hub`.
    """
    named, passed_over = (given, "") if given else _named(roles)
    store = KeyStore(folder or keys_folder())
    path = named or next(store.files(roles), None)
    if path is None:
        raise RunError(
            f"this hub wants a key of role {' or '.join(roles)}, and there is none in {store.folder}{passed_over}; "
            f"name its file with --key or COCKPIT_KEY, or make one: cockpit keys make NAME --role {roles[0]}"
        )
    key = load_key(path)
    if key.role not in roles:
        raise RunError(f"{path} is a key of role {key.role}, and this takes one of role {' or '.join(roles)}")
    if hub and key.hub != hub:
        raise RunError(f"{path} is a key for another hub than this one; use one made in the hub's key folder")
    return key


def _named(roles: Sequence[Role]) -> tuple[Path | None, str]:
    """The file of ``COCKPIT_KEY`` to use, and which were passed over. A rank's key is not meant for a cockpit, nor the
    other way round, though both may be exported."""
    files = [Path(file) for file in os.environ.get(KEY_VARIABLE, "").split(os.pathsep) if file]
    found = [(file, load_key(file).role) for file in files]
    of_a_rank = Role.RANK in roles
    meant = [(file, role) for file, role in found if (role == Role.RANK) is of_a_rank]
    fits = next((file for file, role in meant if role in roles), None)
    others = ", ".join(f"{file} of role {role}" for file, role in found)
    return fits or (meant[0][0] if meant else None), f" (COCKPIT_KEY names {others})" if others else ""


class KeyStore:
    """A folder of keys. It is made when the first key is, and is ours alone or refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def listed(self) -> list[Listed]:
        """All keys in force and the newest revoked ones, oldest first. RunError if the list cannot be trusted."""
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
        """The files of keys that are in force, in order of `roles`."""
        in_force = [row for row in self.listed() if row.revoked_s is None]
        for role in roles:
            for row in in_force:
                if row.role is role and self.file(row.name).is_file():
                    yield self.file(row.name)

    def hub_key(self) -> Key:
        """The hub's own key, made if there is none yet."""
        with self._alone():
            path = self.file(HUB)
            if not path.exists():
                public, secret = _new_pair()
                _write_private(path, Key(HUB, HUB, public, secret, public))
            return load_key(path)

    def make(self, name: str, role: Role) -> Path:
        """A new key and its place in the list; the file of it. RunError: the name is taken or cannot be."""
        if not _NAME.fullmatch(name) or name == HUB:
            raise RunError(
                f"a key cannot be named {name[:70]!r}; legal: letters, digits, '.', '_' and '-', and not {HUB}"
            )
        hub = self.hub_key().public
        with self._alone():
            listed = self.listed()
            if any(row.name == name and row.revoked_s is None for row in listed):
                raise RunError(f"there is a key {name} already; revoke it first, or choose another name")
            if sum(row.revoked_s is None for row in listed) >= MOST_KEYS:
                raise RunError(
                    f"there are {MOST_KEYS} keys in force in {self.folder}, which is the most; revoke one, or make the "
                    "key in another folder"
                )
            public, secret = _new_pair()
            path = self.file(name)
            _write_private(path, Key(name, role, public, secret, hub))
            self._write_list([*listed, Listed(name, role, public, time.time())])
        return path

    def revoke(self, name: str) -> Listed:
        """Take a key out of force; hubs that run take notice within a second. RunError: there is no such key."""
        with self._alone():
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
            self.file(name).unlink(missing_ok=True)  # first: a full disk then has room for the list
            self._write_list([revoked if row is found else row for row in listed])
        return revoked

    def _write_list(self, rows: list[Listed]) -> None:
        """Write the list without the keys that were revoked long ago, so that it stays small enough to be read."""
        revoked = sorted(row.revoked_s for row in rows if row.revoked_s is not None)[-REVOKED_KEPT:]
        kept = [row for row in rows if row.revoked_s is None or row.revoked_s >= revoked[0]]
        _write_private(self.folder / LIST_FILE, kept)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One writer at a time."""
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
    """A file that nobody else can read or write, of at most `longest` bytes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RunError(f"{path} is no file")
            if found.st_mode & 0o077:
                raise RunError(
                    f"{path} can be read or written by others; keep it to yourself: chmod 600 {path}"
                )
            raw = file.read(longest + 1)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > longest:
        raise RunError(f"{path} has over {longest} bytes, which no file of ours has")
    return raw


def _write_private(path: Path, what: Key | list[Listed]) -> None:
    """Whole or not at all, and never for a moment readable by others."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(what), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
