"""The training text, and the check that all ranks have the same text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.parallel.collectives import Axis
from engine.train.batches.corpus import Corpus, read_corpus
from engine.train.batches.samples import check_same_corpus
from tests.unit.engine.config.test_layout import DEMO


class Control(Axis):
    """A fake of the process group of all ranks (the axis `control`). Its all-gather returns digests as if the other
    ranks had read the training texts `others`."""

    def __init__(self, *others: Corpus) -> None:
        self._others = others

    def all_gather(self, x: Tensor) -> Tensor:
        theirs = [torch.frombuffer(bytearray(c.digest.encode()), dtype=torch.uint8) for c in self._others]
        return torch.stack([x, *theirs])


def of(text: bytes) -> Corpus:
    return Corpus(np.frombuffer(text, np.uint8))


def test_ranks_with_another_text_refuse_to_start() -> None:
    ours, theirs = of(b"def main():"), of(b"def main( ):")
    check_same_corpus(ours, "stdlib", Control(of(b"def main():")))
    with pytest.raises(LayoutError) as refused:
        check_same_corpus(ours, "stdlib", Control(ours, theirs, theirs))
    assert str(refused.value) == (
        f"rank 2 (and 1 more) has read a different text than rank 0: data.source = 'stdlib' has the digest "
        f"{theirs.digest} "
        f"on rank 2 and {ours.digest} on rank 0; legal: the same files on every machine, and for stdlib the same "
        "release of Python"
    )


def test_a_digest_pins_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 400)
    source = f"data.source=text:{tmp_path}/*.txt"
    digest = read_corpus(load(DEMO, [source])).digest
    assert read_corpus(load(DEMO, [source, f"data.digest={digest}"])).digest == digest
    (tmp_path / "a.txt").write_bytes(b"x" * 399 + b"y")
    with pytest.raises(
        LayoutError, match=f"data.digest = {digest}, but the files of data.source = "
    ) as refused:
        read_corpus(load(DEMO, [source, f"data.digest={digest}"]))
    assert "\n" not in str(refused.value)
    with pytest.raises(LayoutError, match="legal: blake2b- and 16 hexadecimal digits or none"):
        load(DEMO, ["data.digest=12"])
