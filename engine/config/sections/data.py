"""Layout sections for the training text and the validation text. Torch-free."""

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
        Literal["bytes"],
        "tokenizer of stdlib and text: each byte is a token; token shards contain the "
        "name of their tokenizer",
    ] = "bytes"
    shards: Annotated[
        tuple[Line, ...] | None,
        'with source = shards: folders that `engine tokenize` wrote, such as ["web", "code"]',
    ] = None
    weights: Annotated[
        tuple[Above, ...] | None,
        "weight of each folder in the mixture of samples; absent: in proportion to their sizes",
    ] = None
    epochs: Annotated[
        Positive | None,
        "with source = shards: maximum number of times that a sample is used; a run with more steps is "
        "refused; absent: no limit",
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
        Natural,
        "steps between two measurements; if not 0, the loss is also measured at the end of the "
        "run; 0: no measurements",
    ] = 0
    source: Annotated[Line, "source of the validation text; the values are those of data.source"] = "shards"
    shards: Annotated[
        tuple[Line, ...] | None, "with source = shards: folders of token shards, as in data.shards"
    ] = None
    sequences: Annotated[
        Positive,
        "sequences per measurement, the same in each measurement; a multiple of the number of data-parallel ranks",
    ] = 32
