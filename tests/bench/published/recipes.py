"""Settings that the tables of published runs leave out, taken from the public recipes."""

from typing import Any

# (layers, stages) -> layers of each stage for DeepSeek-V3 and Kimi K2. In Megatron-Bridge's notation the splits are
# "Et*4|(t*4|)*14tmL" and "Et|(tt|)*30mL".
RECIPE_SPLITS = {
    (61, 8): (8,) * 7 + (5,),
    (61, 16): (4,) * 15 + (1,),
    (61, 32): (1,) + (2,) * 30 + (0,),
}


PARTS = ("mixer", "router", "experts")


def recipe(model: str, gpu: str, release: str, precision: str) -> dict[str, Any]:
    """Job settings from the performance recipes of Megatron-Bridge: which parts run in CUDA graphs, and whether the
    recipe uses overlapped dispatch, deduplicated dispatch and grouped kernels. The recipes are in
    scripts/performance/configs at the tag of each container (25.09 v0.1, 25.11 v0.2, 26.02 v0.3, 26.04 v0.4, 26.06
    v0.5)."""
    year = float(release[:5])
    name = model.split(" (")[0]
    if "tokendrop" in model and gpu != "H100" and "DeepSeek" not in model:
        return {"graphs": PARTS}  # dropping and padding fix all sizes, so a graph can contain whole layers
    if name == "Qwen3_30B_a3B" and year >= 26.06:
        return {"graphs": PARTS, "overlap_experts": True, "grouped": True}
    if name == "Qwen3_30B_a3B" and year >= 25.11:
        return {"graphs": ("mixer", "router") if gpu == "B200" and year >= 26.04 else ("router",)}
    if name == "Qwen3_235B_a22B" and gpu == "H100":
        return {"overlap_experts": year >= 25.11}
    if name == "DeepSeekV3" and gpu == "H100":
        return {"overlap_experts": True, "deduplicated": True}
    if name == "DeepSeekV3" and gpu == "B200" and release == "26.04.01":
        return {"overlap_experts": True, "deduplicated": True, "graphs": ("mixer", "router")}
    if name == "DeepSeekV3" and gpu in ("GB200", "GB300"):
        return {"graphs": ("mixer", "router") if gpu == "GB300" else ("router",)}
    if name == "GPT OSS 120B" and gpu == "B300":
        late = {"overlap_experts": True, "grouped": True} if precision == "MXFP8" else {}
        return {"graphs": ("mixer", "router")} | late
    if name.startswith("Nemotron_3"):
        return {"graphs": ("mixer", "router")}
    return {}
