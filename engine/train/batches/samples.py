"""Makes batches from the training text. A sample depends only on (seed, step, index), so samples are the same in every
layout. Therefore a run can resume at any step and in another layout, and a checkpoint needs no data loader state."""

import torch
from torch import Tensor

from engine.config.refusal import LayoutError
from engine.data.mixture import Text
from engine.device import CPU
from engine.parallel.collectives import Axis
from engine.parallel.sequences import Sequences
from engine.train.batches.loader import HostBatch, Loader


class Samples:
    """Reads one rank's samples from the training or validation text. `positions` selects the tokens of each sample that
    this rank needs (default: all). A thread reads `prefetch` batches ahead if steps are consecutive. `documents`:
    whether a batch contains the start positions of documents. `mtp_layers`: the number of multi-token prediction
    layers, each of which adds one further target per token."""

    def __init__(
        self,
        text: Text,
        seq_len: int,
        global_batch: int,
        seed: int,
        positions: Tensor | None = None,
        device: torch.device = CPU,
        prefetch: int = 0,
        documents: bool = False,
        mtp_layers: int = 0,
    ):
        self._device, self._mtp_layers = device, mtp_layers
        self._windows = text.windows(seq_len, global_batch, seed, documents)
        self._positions = torch.arange(seq_len) if positions is None else positions
        self._loader = Loader(self._read, prefetch, device)
        self.epochs: tuple[tuple[int, int, int], ...] = ()  # epochs of the last batch, as in `Batch`

    def batch(self, step: int, first: int, count: int) -> Sequences:
        """`count` sequences of a step, starting with the sequence at index `first`."""
        found = self._loader.get(step, first, count)
        self.epochs = found.epochs
        return Sequences(*(x.to(self._device, non_blocking=True) for x in found.tensors))

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._loader.close()

    def _read(self, step: int, first: int, count: int) -> HostBatch:
        batch = self._windows.batch(step, first, count)
        tokens = torch.from_numpy(batch.tokens)
        starts = () if batch.starts is None else (torch.from_numpy(batch.starts),)
        targets = tokens[:, 1:]
        if self._mtp_layers:
            targets = further_targets(targets, self._mtp_layers, *starts)
        return HostBatch((tokens[:, self._positions], targets[..., self._positions], *starts), batch.epochs)


def further_targets(targets_BW: Tensor, layers: int, starts_BW: Tensor | None = None) -> Tensor:
    """Targets [B, 1 + layers, W]: first the next tokens, `targets_BW`; then, for each multi-token prediction layer,
    numbered k = 1, 2, ..., the same tokens shifted by k positions. At position i, the layer reads token i + k and
    predicts token i + k + 1. The target is -1 if there is no such token in the sequence or, with `starts_BW`, if the
    tokens i and i + k belong to different documents."""
    further = torch.stack([targets_BW.roll(-k, 1) for k in range(1 + layers)], 1)
    for k in range(1, 1 + layers):
        further[:, k, -k:] = -1
        if starts_BW is not None:
            further[:, k, :-k][starts_BW[:, k:] != starts_BW[:, :-k]] = -1
    return further


def check_same_corpus(corpus: Text, source: str, control: Axis) -> None:
    """Check that all ranks have read the same text; if not, raise the same LayoutError on all ranks.

    In a pipeline, the first stage reads the inputs and the last stage the targets: if the two stages read different
    text, inputs and targets would not match. Collective over `control`.
    """
    mine = torch.frombuffer(bytearray(corpus.digest.encode()), dtype=torch.uint8)
    digests = [bytes(row.tolist()).decode() for row in control.all_gather(mine)]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        more = f" (and {len(others) - 1} more)" if others[1:] else ""
        raise LayoutError(
            f"rank {others[0]}{more} has read a different text than rank 0: data.source = {source!r} has "
            f"the digest "
            f"{digests[others[0]]} on rank {others[0]} and {digests[0]} on rank 0; legal: the same files on every "
            "machine, and for stdlib the same release of Python"
        )
