"""Key files and the list of keys: a file that other users can access, or that is malformed, is rejected with a
one-sentence error message."""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

from agents.protocol.base import RunError
from agents.transport.authenticator import ZapAuthenticator
from agents.transport.curve_keys import (
    KEY_VARIABLE,
    LIST_FILE,
    MOST_KEYS,
    REVOKED_KEPT,
    KeyStore,
    Listed,
    find_key,
    keys_folder,
    load_key,
)
from agents.transport.roles import Role

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="another platform has another folder")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyStore:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("COCKPIT_KEYS", str(tmp_path / "keys"))
    return KeyStore(tmp_path / "keys")


def test_every_file_is_private_whatever_the_umask(store: KeyStore) -> None:
    before = os.umask(0)
    try:
        store.make("ann", Role.VIEWER)
        store.make("bob", Role.OPERATOR)
        store.revoke("ann")
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    modes = {
        file.name: file.stat().st_mode & 0o777 for file in store.folder.iterdir() if file.name != ".lock"
    }
    assert modes == {"hub.key": 0o600, "bob.key": 0o600, LIST_FILE: 0o600}


def test_a_key_file_has_everything_needed_to_connect(store: KeyStore) -> None:
    key = load_key(store.make("ann", Role.VIEWER))
    assert (key.name, key.role, key.hub) == ("ann", "viewer", store.hub_key().public)
    assert key.secret not in repr(key)


def test_a_name_is_taken_until_its_key_is_revoked(store: KeyStore) -> None:
    first = load_key(store.make("ann", Role.VIEWER))
    with pytest.raises(RunError, match="the key ann already exists"):
        store.make("ann", Role.OPERATOR)
    store.revoke("ann")
    second = load_key(store.make("ann", Role.OPERATOR))
    assert second.public != first.public
    assert [(row.role, row.revoked_s is None) for row in store.listed()] == [
        (Role.VIEWER, False),
        (Role.OPERATOR, True),
    ]
    with pytest.raises(RunError, match="no key zed in force; the keys in force are: ann"):
        store.revoke("zed")


def test_the_list_stays_readable_with_any_number_of_keys(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists written by older releases, which never removed revoked keys, remain readable. A key can always be revoked,
    even if the list is full.
    """

    def write_list(rows: list[Listed]) -> None:
        (store.folder / LIST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))

    store.make("ann", Role.VIEWER)
    (ann,) = store.listed()
    gone = [structs.replace(ann, name=f"old{number}", revoked_s=float(number + 1)) for number in range(7000)]
    write_list([*gone, ann])
    assert (store.folder / LIST_FILE).stat().st_size > 1 << 20
    store.revoke("ann")
    rows = store.listed()
    assert [row.name for row in rows] == [*(f"old{number}" for number in range(6745, 7000)), "ann"]
    assert (store.folder / LIST_FILE).stat().st_size < 64 << 10
    longest = structs.replace(ann, name="n" * 64, made_s=1e9 / 7, revoked_s=1e9 / 3)
    size = len(msgspec.json.format(msgspec.json.encode([longest] * (MOST_KEYS + REVOKED_KEPT)), indent=2))
    assert size < 1 << 20
    in_force = [structs.replace(ann, name=f"n{number}") for number in range(MOST_KEYS)]
    write_list(in_force)
    with pytest.raises(RunError, match=r"already has 1024 keys in force, the limit; revoke one"):
        store.make("more", Role.VIEWER)
    with pytest.raises(RunError, match=r"are: n0, n1, .*n19 and 1004 more$"):
        store.revoke("more")
    store.revoke("n7")
    store.make("more", Role.VIEWER)


def test_a_hub_detects_a_revocation_with_cached_stat(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS caches attributes of paths, but asks the server when a file is opened."""
    key = load_key(store.make("ann", Role.VIEWER)).public.encode()
    path = store.folder / LIST_FILE
    remembered, look = path.stat(), os.stat

    def stale(of: str | Path, **options: Any) -> os.stat_result:
        return remembered if str(of) == str(path) else look(of, **options)

    with zmq.Context() as context:
        authenticator = ZapAuthenticator(context, store)
        try:
            assert authenticator.grant(key)
            monkeypatch.setattr(os, "stat", stale)
            store.revoke("ann")
            assert path.stat() == remembered
            deadline = time.monotonic() + 60
            while authenticator.grant(key):
                assert time.monotonic() < deadline, "it does not see that the list has changed"
                time.sleep(0.01)
        finally:
            authenticator.close()


def test_a_list_that_is_not_a_file_is_refused(store: KeyStore) -> None:
    store.make("ann", Role.VIEWER)
    (store.folder / LIST_FILE).unlink()
    os.mkfifo(store.folder / LIST_FILE, 0o600)
    with pytest.raises(RunError, match=r"allowed.json is not a regular file"):
        store.listed()


def test_a_failed_write_leaves_the_list_unchanged(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.make("ann", Role.VIEWER)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="cannot be used: No space left on device"):
            store.revoke("ann")
    assert sorted(file.name for file in store.folder.iterdir()) == [".lock", LIST_FILE, "hub.key"]
    assert store.revoke("ann").revoked_s is not None


def test_a_lock_that_is_a_link_overwrites_no_file(store: KeyStore, tmp_path: Path) -> None:
    store.make("ann", Role.VIEWER)
    precious = tmp_path / "precious"
    precious.write_text("all I have")
    (store.folder / ".lock").unlink()
    (store.folder / ".lock").symlink_to(precious)
    with pytest.raises(RunError, match=r"cannot be used: .lock is a link"):
        store.revoke("ann")
    assert precious.read_text() == "all I have"


@pytest.mark.parametrize("name", ["", "hub", "../up", "a/b", ".hidden", "x" * 65, "a b"])
def test_an_illegal_key_name_is_refused(store: KeyStore, name: str) -> None:
    with pytest.raises(RunError, match="a key cannot be named"):
        store.make(name, Role.VIEWER)


def test_a_key_is_found_by_role_and_named_by_variable(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"requires a key of role viewer or operator.*cockpit keys make NAME"):
        find_key((Role.VIEWER, Role.OPERATOR))
    store.make("node", Role.RANK)
    operator = store.make("bob", Role.OPERATOR)
    assert find_key((Role.VIEWER, Role.OPERATOR)).name == "bob"
    viewer = store.make("ann", Role.VIEWER)
    assert find_key((Role.VIEWER, Role.OPERATOR)).name == "ann"
    monkeypatch.setenv(KEY_VARIABLE, str(operator))
    assert find_key((Role.VIEWER, Role.OPERATOR)).name == "bob"
    with pytest.raises(
        RunError, match="a key of role viewer, but this connection needs one of role operator"
    ):
        find_key((Role.OPERATOR,), viewer)
    with pytest.raises(RunError, match="a key for another hub"):
        find_key((Role.OPERATOR,), operator, hub="x" * 40)


def test_the_key_of_a_rank_and_that_of_an_operator_may_both_be_exported(
    store: KeyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = KeyStore(tmp_path / "elsewhere")
    node, ann, bob = (
        elsewhere.make(name, role)
        for name, role in (("node", Role.RANK), ("ann", Role.VIEWER), ("bob", Role.OPERATOR))
    )
    watch = (Role.VIEWER, Role.OPERATOR)
    monkeypatch.setenv(KEY_VARIABLE, f"{bob}:{node}")
    assert (find_key((Role.RANK,)).name, find_key(watch).name) == ("node", "bob")
    monkeypatch.setenv(KEY_VARIABLE, f"{ann}:{bob}")
    assert (find_key(watch).name, find_key((Role.OPERATOR,)).name) == ("ann", "bob")
    with pytest.raises(
        RunError, match=r"none in .*/keys \(COCKPIT_KEY names .*ann.key of role viewer, .*bob.key of"
    ):
        find_key((Role.RANK,))
    store.make("cluster", Role.RANK)
    assert find_key((Role.RANK,)).name == "cluster"
    monkeypatch.setenv(KEY_VARIABLE, str(ann))
    with pytest.raises(
        RunError, match=r"ann.key is a key of role viewer, but this connection needs one of role operator"
    ):
        find_key((Role.OPERATOR,))


def test_a_key_that_others_can_read_is_refused(store: KeyStore) -> None:
    path = store.make("ann", Role.VIEWER)
    path.chmod(0o640)
    with pytest.raises(RunError, match="chmod 600"):
        load_key(path)
    (store.folder / LIST_FILE).chmod(0o666)
    with pytest.raises(RunError, match="chmod 600"):
        store.listed()
    store.folder.chmod(0o755)
    with pytest.raises(RunError, match="mode 0700"):
        store.make("bob", Role.VIEWER)


def test_an_invalid_key_file_gets_one_sentence(store: KeyStore, tmp_path: Path) -> None:
    mine, other = store.make("ann", Role.VIEWER), store.make("bob", Role.VIEWER)
    swapped = mine.read_text().replace(load_key(mine).secret, load_key(other).secret)
    for text, sentence in {
        "": "is not a key file",
        "[1]": "is not a key file",
        "x" * 5000: "more than 4096 bytes",
        swapped: "do not match",
    }.items():
        path = tmp_path / "bad.key"
        path.touch(0o600)
        path.write_text(text)
        with pytest.raises(RunError, match=sentence):
            load_key(path)
    with pytest.raises(RunError, match="cannot be read: No such file"):
        load_key(tmp_path / "absent.key")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"COCKPIT_KEYS": "/k", "XDG_CONFIG_HOME": "/c"}, "/k"),
        ({"XDG_CONFIG_HOME": "/c"}, "/c/cockpit/keys"),
        pytest.param({}, "/home/ada/.config/cockpit/keys", marks=ON_LINUX),
    ],
)
def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], folder: str) -> None:
    for name in ("COCKPIT_KEYS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/ada"} | environ).items():
        monkeypatch.setenv(name, value)
    assert keys_folder() == Path(folder)


def test_a_user_without_a_home_gets_one_sentence(homeless: None) -> None:
    with pytest.raises(RunError, match="no home directory; name a folder of keys with COCKPIT_KEYS"):
        keys_folder()
