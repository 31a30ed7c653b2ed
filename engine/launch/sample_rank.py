"""The main function of each rank of `engine sample`: it joins the process group, loads the weights and generates
text."""

import torch
import torch.distributed as dist

from engine.launch.rank_main import check_same_layout, join_process_group
from engine.metering.meter import Meter
from engine.parallel.mesh import World
from engine.planner.memory.cache import cache_bytes
from engine.rendezvous import RankContext
from engine.sampling.decoder import Decoder
from engine.sampling.generation import generate
from engine.sampling.request import OnGenerated, OnTokens, Request


def sample(
    context: RankContext, request: Request, device: str, on_tokens: OnTokens, on_generated: OnGenerated
) -> None:
    """Generate text as the rank that `context` describes. Rank 0 calls the callbacks."""
    layout, store = request.layout, context.store()
    check_same_layout(layout, context, store)
    mine = join_process_group(context, store, device)
    model = layout.model
    meter = Meter(
        model.prediction_layers.stop, model.moe.experts if model.moe else 0, context.set_operation, mine
    )
    world = World(layout.ranks, meter, mine, layout.ep_inner)
    positions = len(request.prompt) + request.tokens
    decoder = Decoder(layout, world, meter, 1, positions)
    decoder.load(request.checkpoint)
    leads = context.rank == 0
    done = generate(
        decoder,
        torch.tensor([request.prompt]),
        request.tokens,
        request.choice,
        request.end,
        on_tokens if leads else lambda _: None,
        context.stop_requested,
    )
    item = decoder.dtype.itemsize
    formula = cache_bytes(model, len(decoder.stage.layers), layout.grid.tp, positions, 1, item)
    found = world.control.all_reduce(torch.tensor([decoder.caches.bytes, formula]))
    if leads:
        on_generated(done, *found.tolist())
    dist.destroy_process_group()  # gloo aborts at exit if the group still exists
