"""``cockpit keys`` creates, lists and revokes keys for hubs that listen on TCP. Each command returns the exit
status."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from agents.protocol.base import RunError
from agents.transport.curve_keys import KeyStore, Listed, keys_folder, load_key
from agents.transport.roles import Role
from cockpit.data import format
from cockpit.data.sources.connection import CockpitError
from cockpit.printing import print_json, print_line, print_table

Options = argparse.Namespace


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `cockpit keys` and their options."""
    actions = parser.add_subparsers(metavar="make|list|revoke", required=True)
    for name, (call, about) in ACTIONS.items():
        action = actions.add_parser(name, help=about, description=about)
        if name != "list":
            action.add_argument(
                "name", metavar="NAME", help="name of the key, such as its owner or a cluster"
            )
        if name == "make":
            action.add_argument(
                "--role",
                required=True,
                choices=[role.value for role in Role],
                help="rank: send records · viewer: watch · operator: watch and change",
            )
        action.add_argument(
            "--folder",
            type=Path,
            help="folder of keys (default: COCKPIT_KEYS, else cockpit/keys in the configuration folder)",
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(call=_guarded(call))


def _guarded(call: Callable[[Options, KeyStore], int]) -> Callable[[Options], int]:
    def guarded(options: Options) -> int:
        try:
            return call(options, KeyStore(options.folder or keys_folder()))
        except RunError as error:
            raise CockpitError(str(error)) from None

    return guarded


def _make(options: Options, store: KeyStore) -> int:
    path = store.make(options.name, Role(options.role))
    key = load_key(path)
    if options.json:
        print_json({"name": key.name, "role": key.role, "public": key.public, "file": str(path)})
    else:
        print_line(f"{path}: give this file only to the owner of the key")
    return 0


def _list(options: Options, store: KeyStore) -> int:
    listed = store.listed()
    if options.json:
        print_json({"folder": str(store.folder), "keys": [_record(row, store) for row in listed]})
        return 0
    rows = [["key", "role", "made", "state", "public"]]
    for row in listed:
        state = "in force" if row.revoked_s is None else f"revoked {_day(row.revoked_s)}"
        rows.append([format.clean(row.name), row.role, _day(row.made_s), state, row.public])
    print_table(rows)
    return 0


def _revoke(options: Options, store: KeyStore) -> int:
    row = store.revoke(options.name)
    if options.json:
        print_json(_record(row, store))
    else:
        print_line(f"the key {row.name} is revoked; running hubs apply it within a second")
    return 0


def _record(row: Listed, store: KeyStore) -> dict[str, object]:
    file = store.file(row.name) if row.revoked_s is None else None
    return {
        "name": row.name,
        "role": row.role,
        "public": row.public,
        "made_s": row.made_s,
        "revoked_s": row.revoked_s,
        "file": str(file) if file and file.is_file() else None,
    }


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


ACTIONS: dict[str, tuple[Callable[[Options, KeyStore], int], str]] = {
    "make": (_make, "make a key and add it to the list"),
    "list": (_list, "list keys in force and recently revoked keys"),
    "revoke": (_revoke, "revoke a key and close its open connections"),
}
