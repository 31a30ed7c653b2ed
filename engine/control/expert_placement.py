"""Expert placement: moves experts to other ranks between two steps, on an operator's request.

An all-reduce gives all ranks the same recent loads of the experts. From these loads, all ranks of a stage compute the
same new expert maps (which rank holds which expert). Then all ranks allocate buffers and vote. If any rank votes
against the move, no expert moves. Values are copied bit for bit, so a placement does not change the results of
training.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import msgspec
import torch
from torch import Tensor, nn

from agents.protocol import Event
from engine.control.expert_transfer import Move, bytes_of_an_expert
from engine.control.placement_effect import Figures, placement_text
from engine.control.vote import Vote
from engine.parallel.mesh import World
from engine.planner.expert_placement import Map, Sent, imbalance, local_share, plan_map
from engine.sharding.compression.reductions import Compression
from engine.sharding.expert_rows import moe_layers

WINDOW = 16  # time constant, in steps, of the exponential moving average of an expert's load


class ExpertPlacement:
    """Carries out expert placement on one rank. `request`: the goal of the requested placement (`load`, `traffic` or
    `logical`), or None. `moved`: whether the last call of `carry_out` moved experts."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        world: World,
        compression: Compression | None = None,
    ):
        self.request: str | None = None
        self.moved = False
        self._layers, self._optimizer, self._world = moe_layers(stages), optimizer, world
        self._recent: Tensor | None = None
        self._compression = compression

    @property
    def _residuals(self) -> Mapping[nn.Parameter, Tensor]:
        return self._compression.residuals if self._compression else {}

    def record_load(self, load: Tensor) -> None:
        """Update the moving average of the load. `load[layer, expert]`: how many of this rank's tokens were routed to
        the expert in a step."""
        if self._recent is None:
            self._recent = torch.zeros_like(load, dtype=torch.float64, device="cpu")
        self._recent.mul_(1.0 - 1.0 / WINDOW).add_(load.cpu(), alpha=1.0 / WINDOW)

    def carry_out(self) -> Event | None:
        """Carry out the requested expert placement, if there is one: vote, move the experts, and return an event that
        reports the result. All ranks must call this method together (it contains collectives)."""
        goal, self.request, self.moved = self.request, None, False
        if goal is None:
            return None
        sent = self._sent()
        why, move, figures = "", None, Figures(0.0)
        try:
            maps = {n: plan_map(goal, layer.placement.logical, sent[n]) for n, layer in self._layers.items()}
            figures = self._figures(maps, sent)
            if figures.experts:
                move = Move(self._layers, maps, self._optimizer, self._world, self._residuals)
        except Exception as refusal:  # noqa: BLE001 - a rank that fails must still vote, or the others hang
            why = str(refusal) or type(refusal).__name__
        refused, total = self._agree(why, figures)
        if refused:
            return Event(time.time(), "warning", "engine", f"experts were not moved: {refused}")
        if move:
            move.run()
        self.moved = total.experts > 0
        return Event(time.time(), "info", "engine", placement_text(goal, total))

    def _sent(self) -> dict[int, Sent]:
        """For each layer, an array [ep rank, expert]: how many tokens of a step the ranks with this index on the ep
        axis route to the expert, as a moving average. The counts of all ranks with the same ep index are summed. An
        all-reduce gives all ranks of the job the same arrays."""
        world = self._world
        recent = self._recent
        assert recent is not None, "no step has been recorded"
        from_E = torch.zeros(world.grid.ep, *recent.shape, dtype=torch.float64)
        from_E[world.coords["ep"]] = recent
        whole = world.control.all_reduce(from_E)
        return {n: whole[:, n].numpy() for n in self._layers}

    def _figures(self, maps: dict[int, Map], sent: dict[int, Sent]) -> Figures:
        """The effect of the new expert maps on this rank's stage, such as the imbalance before and after, and the bytes
        to move."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(sorted(maps.items())), digest_size=6).digest()
        now = {n: layer.placement.logical for n, layer in self._layers.items()}
        moved = {n: sum(a != b for a, b in zip(now[n], new, strict=True)) for n, new in maps.items()}
        residuals = self._residuals
        weight = {
            n: bytes_of_an_expert(layer, self._optimizer, residuals) for n, layer in self._layers.items()
        }
        return Figures(
            float(int.from_bytes(digest, "little")),
            len(maps),
            sum(imbalance(now[n], sent[n]) for n in maps),
            sum(imbalance(new, sent[n]) for n, new in maps.items()),
            sum(local_share(now[n], sent[n]) for n in maps),
            sum(local_share(new, sent[n]) for n, new in maps.items()),
            sum(moved.values()),
            sum(moved[n] * weight[n] for n in maps) * self._world.grid.dp_replicate,
        )

    def _agree(self, why: str, figures: Figures) -> tuple[str, Figures]:
        """Vote on moving the experts. Returns ("", the effect of the move summed over all stages) if all ranks agree,
        else (the first objection, this stage's `figures`)."""
        mine = torch.tensor(astuple(figures), dtype=torch.float64)
        rows = self._world.control.all_gather(torch.cat((Vote(why).packed(), mine.view(torch.uint8))))
        figures_by_rank = rows[:, -mine.nbytes :].contiguous().view(torch.float64)
        votes = [Vote.unpacked(row[: -mine.nbytes]) for row in rows]
        for rank, vote in enumerate(votes):
            if vote.why:
                return f"rank {rank}: {vote.why}", figures
        stages = figures_by_rank.view(self._world.grid.pp, -1, figures_by_rank.shape[1])
        if (stages[:, :, 0] != stages[:, :1, 0]).any():
            return "ranks of one stage planned different maps", figures
        return "", Figures(*stages[:, 0].sum(0).tolist())
