"""Knob changes in the form that the MCP tools receive, and their conversion to command-line arguments."""

from typing import Annotated

from pydantic import Field

from agents.protocol import spell

Knob = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$", description="name of a knob")]
KnobValue = (
    Annotated[bool, Field(strict=True)]
    | Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[
        str,
        Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+$"),
    ]
    | None
)
Changes = Annotated[
    dict[Knob, KnobValue],
    Field(min_length=1, max_length=16, description='values by knob, such as {"micro_batches": 8}'),
]


def words_of(changes: Changes) -> list[str]:
    """The changes as arguments of `cockpit set`, such as ``micro_batches=8``."""
    return [f"{name}={spell(value)}" for name, value in changes.items()]
