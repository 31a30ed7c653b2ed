"""Reads the newest collectives of this process from torch's flight recorder, which is on unless TORCH_FR_BUFFER_SIZE
is 0."""

import json
from typing import Any

from torch._C import _distributed_c10d as c10d

GROUPS = 4  # maximum number of process groups in the sentence, those with the newest collectives


def newest_collectives() -> str:
    """One sentence about the newest collective of each process group: its name, its sequence number in the group, and
    whether it has completed on this rank. Returns an empty string if torch has no flight recorder or the recorder is
    off. This function also works while another thread hangs in a collective.
    """
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump else []
    newest: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["record_id"])):
        group = " ".join(map(str, entry["process_group"]))
        newest.pop(group, None)
        newest[group] = entry
    return ", ".join(_sentence(group, entry) for group, entry in list(newest.items())[: -GROUPS - 1 : -1])


def _sentence(group: str, entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    state = "complete" if entry["retired"] else "not complete"
    return f"{entry['profiling_name']} number {number} of group {group} {state}"
