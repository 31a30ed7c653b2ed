"""Generates `engine/checkpoint/huggingface/defaults.json` from the configuration classes of the installed transformers:

python -m tests.unit.engine.checkpoint.transformers_defaults > engine/checkpoint/huggingface/defaults.json
"""

import json
from dataclasses import fields
from typing import Any

from engine.checkpoint.huggingface.architectures import ARCHITECTURES

# Fields that say nothing about the model, or that every configuration has.
NOT_LISTED = {"initializer_range", "use_cache", "output_router_logits", "pretraining_tp", "rope_parameters"}


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """For each `model_type`: `defaults`, the value of each key of config.json that is absent; `aliases`, other names of
    these keys."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    common = {field.name for field in fields(PretrainedConfig)}
    found = {}
    for kind in ARCHITECTURES:
        cls = CONFIG_MAPPING[kind]
        defaults = {
            field.name: field.default for field in fields(cls) if field.name not in common | NOT_LISTED
        }
        aliases = {}
        for name, other in cls.attribute_map.items():
            aliases |= {other: name} if name in defaults else {name: other}
        found[kind] = {"defaults": defaults | {"rope_theta": cls.default_theta}, "aliases": aliases}
    return found


def text() -> str:
    return json.dumps(table(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
