"""Sections of a layout that only `engine plan` and `engine simulate` read. Torch-free."""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from engine.config.sections.bounds import Line, Positive

Module = Literal["norm", "latent", "activation"]
MODULES: tuple[Module, ...] = get_args(Module)


class HardwareChoice(Struct, frozen=True):
    """The machine that `engine plan` and `engine simulate` assume. `engine run` uses the machine that it runs on."""

    name: Annotated[
        Line | None, "a known machine, or MACHINE/NETWORK, such as H100/roce-400 (docs/plan/planner.md)"
    ] = None
    path: Annotated[Line | None, "a TOML file with a description of the machine; in place of name"] = None


class Plan(Struct, frozen=True):
    """Other assumptions of `engine plan` and `engine simulate`; `engine run` does not read them."""

    framework: Annotated[
        Literal["engine", "megatron"], "the framework whose sharding and kept activations are assumed"
    ] = "engine"
    release: Annotated[
        Line | None,
        "a known framework release, whose overlap and fitted factor are assumed; absent: the engine",
    ] = None
    split: Annotated[
        tuple[Positive, ...] | None,
        "number of layers of each stage, such as [2, 3]; absent: split by their work, as the engine does",
    ] = None
    recomputed: Annotated[
        Line | None,
        "with megatron: cheap parts of a layer that backward recomputes: norm, latent (up-projections of mla) or "
        "activation, or several, such as norm+latent",
    ] = None
    imbalance: Annotated[
        Annotated[float, Meta(ge=1.0, le=1000.0)], "highest load of an expert-parallel rank over the mean"
    ] = 1.0
    sequence_parallel: Annotated[bool, "whether tp also splits the sequence between matrix products"] = True
    fused_attention: Annotated[bool, "whether attention keeps its scores on the chip (FlashAttention)"] = True
    overlap_experts: Annotated[bool, "whether all-to-alls of one micro-batch run while another computes"] = (
        False
    )
    deduplicated: Annotated[
        bool, "whether a token is sent to another node only once, even if several of its experts are there"
    ] = False
    grouped: Annotated[bool, "whether one kernel computes the products of all experts of a rank"] = False

    @property
    def modules(self) -> tuple[Module, ...]:
        """The parts of a layer that `recomputed` lists, such as ("norm", "latent")."""
        names = self.recomputed.split("+") if self.recomputed else []
        return tuple(module for module in MODULES if module in names)
