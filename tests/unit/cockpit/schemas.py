"""Validates records that commands print as JSON against their published schemas."""

from typing import Any

from jsonschema import Draft202012Validator

from cockpit.cli.schemas.command import schema


def check(name: str, *records: Any) -> None:
    """Check that each record satisfies the schema `name` and has no field that the schema does not list."""
    found = schema(name)
    Draft202012Validator.check_schema(found)
    for validator in (Draft202012Validator(found), Draft202012Validator(closed(found))):
        for record in records:
            problems = sorted(validator.iter_errors(record), key=lambda one: one.json_path)
            assert not problems, "; ".join(f"{one.json_path}: {one.message[:300]}" for one in problems[:5])


def closed(found: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed so that it allows no fields that it does not list."""
    shared = found["$defs"]

    def close(part: Any) -> Any:
        if isinstance(part, list):
            return [close(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "allOf" in part:  # fields of a shared object, and more
            part = {key: value for key, value in part.items() if key != "allOf"} | {
                "properties": part["properties"]
                | shared[part["allOf"][0]["$ref"].rpartition("/")[2]]["properties"]
            }
        made: dict[str, Any] = {key: close(value) for key, value in part.items()}
        if "properties" in part:
            made["additionalProperties"] = False
        return made

    result: dict[str, Any] = close(found)
    return result
