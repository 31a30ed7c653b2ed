"""Sections of a layout about the training text and the validation text. Torch-free."""

from typing import Annotated, Literal

from msgspec import Struct

from engine.config.sections.bounds import Above, Digest, FewBatches, Line, Natural, Positive


class Data(Struct, frozen=True):
    """The training text; it must be the same on all ranks (docs/train/data.md)."""

    source: Annotated[
        Line,
        "`stdlib`: the Python standard library's own source on this machine; `text:GLOB`: every readable file that "
        "matches the pattern (`**` matches any folders), sorted by name, such as `text:/data/**/*.txt`; `shards`: the "
        "folders of `shards`",
    ] = "stdlib"
    tokenizer: Annotated[
        Literal["bytes"], "tokenizer of stdlib and text: a token is a byte; token shards name their own"
    ] = "bytes"
    shards: Annotated[
        tuple[Line, ...] | None,
        'with source = shards: folders that `engine tokenize` wrote, such as ["web", "code"]',
    ] = None
    weights: Annotated[
        tuple[Above, ...] | None,
        "share of each folder in the samples, in any unit; absent: in proportion to their size",
    ] = None
    epochs: Annotated[
        Positive | None,
        "with source = shards: how often a sample may be used; more steps are refused; absent: without end",
    ] = None
    separate_documents: Annotated[
        bool,
        "whether attention stays within a document; with stdlib and text a zero byte ends a document, token shards "
        "say where theirs start",
    ] = False
    reset_positions: Annotated[
        bool, "with separate_documents: whether positions start again from 0 at each document"
    ] = False
    prefetch: Annotated[
        FewBatches,
        "number of batches that a thread reads ahead of training; 0: each is read when it is needed",
    ] = 2
    digest: Annotated[
        Digest | None,
        "digest of the text; absent: any text, but a resumed run requires the text that it began with",
    ] = None


class ValidationSettings(Struct, frozen=True):
    """A text that the run does not train on; its loss is measured during training (docs/train/data.md)."""

    every: Annotated[
        Natural, "steps between two measurements; if not 0, the end of the run is measured too; 0: none"
    ] = 0
    source: Annotated[Line, "as data.source"] = "shards"
    shards: Annotated[tuple[Line, ...] | None, "as data.shards"] = None
    sequences: Annotated[
        Positive,
        "sequences of a measurement, the same each time; a multiple of the number of data-parallel ranks",
    ] = 32
