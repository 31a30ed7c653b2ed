"""Runs small layouts for `python -m tests.bench predict`; measures step times, bytes by axis, and the peak bytes of
live tensor storages.

python -m tests.bench.planner.predict_ranks FOLDER NAME ...   (each rank writes FOLDER/NAME/RANK.json)
"""

import json
import sys
import time
from pathlib import Path

from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext

DEMO = Path(__file__).parents[3] / "layouts" / "demo.toml"
ONE = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "train.global_batch=16", "train.warmup=2"]
DENSE = ["model.moe=none", "model.d_ff=256"]
WARM, STEPS = 3, 12  # number of warm-up steps, which are not measured, and of all steps

LAYOUTS = {
    "dp2": [*ONE, *DENSE, "grid.dp_shard=2"],
    "dp2 large": [
        *ONE,
        *DENSE,
        "grid.dp_shard=2",
        "model.d_model=256",
        "model.d_ff=1024",
        "model.seq_len=128",
    ],
    "dp2 zero3": [*ONE, *DENSE, "grid.dp_shard=2", "train.zero=3"],
    "dp2 recompute": [*ONE, *DENSE, "grid.dp_shard=2", "knobs.recompute=full"],
    "dp2 m1": [*ONE, *DENSE, "grid.dp_shard=2", "knobs.micro_batches=1"],
    "dp2 ep2": [*ONE, "grid.dp_shard=2", "grid.ep=2"],
    "tp2": [*ONE, *DENSE, "grid.tp=2"],
    "tp2 ep2": [*ONE, "grid.tp=2", "grid.ep=2"],
    "cp2 ring": [*ONE, *DENSE, "grid.cp=2"],
    "cp2 ulysses": [*ONE, *DENSE, "grid.cp=2", "grid.cp_method=ulysses"],
    "pp2 1f1b": [*ONE, *DENSE, "grid.pp=2"],
    "pp2 gpipe m8": [*ONE, *DENSE, "grid.pp=2", "schedule.name=gpipe", "knobs.micro_batches=8"],
    "pp2 interleaved": [*ONE, *DENSE, "grid.pp=2", "schedule.name=interleaved"],
    "dp4 ep4": [*ONE, "grid.dp_shard=4", "grid.ep=4"],
    "dp2 tp2": [*ONE, *DENSE, "grid.dp_shard=2", "grid.tp=2"],
    "pp2 dp2 ep2": [*ONE, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2"],
    "dp2 cp2": [*ONE, *DENSE, "grid.dp_shard=2", "grid.cp=2"],
    "demo": ["train.warmup=2"],
    "dp8": [*ONE, *DENSE, "grid.dp_shard=8", "train.global_batch=32"],
}


def layout_of(name: str) -> Layout:
    return load(DEMO, [*LAYOUTS[name], f"train.steps={STEPS}"])


def measure(place: RankContext, layout: Layout, out: Path) -> None:
    import torch.distributed as dist

    from engine.model.moe import moe_layer
    from engine.parallel.expert_all_to_all import Dispatch, plan_dispatch
    from engine.train.trainer import Trainer
    from tests.ranks.memory.live_storages import LiveStorages

    dist.init_process_group("gloo", store=place.store(), rank=place.rank, world_size=place.world)
    over_ep: list[int] = []  # for each hop of a dispatch, the rows that it exchanges with other ranks
    taken: list[tuple[int, int]] = []  # for each dispatch, all sent and all received rows

    def plan(*args: object) -> Dispatch:
        dispatch = plan_dispatch(*args)  # type: ignore[arg-type]
        for hop in dispatch.hops:
            rows = sum(hop.send) + sum(hop.receive)
            over_ep.append(rows - hop.send[hop.axis.rank] - hop.receive[hop.axis.rank])
        received = sum(dispatch.hops[-1].receive) if dispatch.hops else len(dispatch.tokens_N)
        taken.append((len(dispatch.tokens_N), received))
        return dispatch

    moe_layer.plan_dispatch = plan  # type: ignore[assignment]
    trainer = Trainer(layout)
    seconds = []
    for step in range(WARM + STEPS):
        over_ep.clear()
        start = time.perf_counter()
        trainer.train_step(step)
        seconds.append(time.perf_counter() - start)
    readings = trainer.meter.readings
    found = {
        "seconds": seconds[WARM:],
        "bytes": {axis: lane.bytes for axis, lane in readings.lanes.items()},
        "rows": sum(over_ep),
        "phases": readings.phases,
        "lanes": {axis: (lane.ms, lane.exposed_ms) for axis, lane in readings.lanes.items()},
        "busy": {kind: readings.busy(kind) for kind in "FBIW"},
        "window": readings.window,
    }
    trainer.close()
    taken.clear()
    with LiveStorages() as live:
        again = Trainer(layout)
        again.train_step(0)
        live.peak = 0
        again.train_step(1)
        found["peak"] = live.peak
    found["imbalance"] = sum(r for _, r in taken) / max(1, sum(s for s, _ in taken)) if taken else 1.0
    (out / f"{place.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        layout, out = layout_of(name), folder / name
        out.mkdir(parents=True)

        def work(place: RankContext, layout: Layout = layout, out: Path = out) -> None:
            measure(place, layout, out)

        world, name_of_rank = layout.ranks.world, layout.ranks.name
        if launch(world, work, name_of_rank=name_of_rank, hub="none", run="predict", run_dir=out):
            raise SystemExit(f"{name}: a rank failed")
        print(name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(LAYOUTS))
