"""Settings of the test runs: the gradient compression methods, the subset of them that `make test` tests, the methods
of the runs that are resumed from a checkpoint, and the smaller parallel layouts (two ranks instead of four) in which
one of these runs is resumed."""

SETTINGS = {
    "none": [],
    "bf16": ["method=bf16"],
    "int8": ["method=int8"],
    "top_k": ["method=top_k", "ratio=0.05"],
    "random_k": ["method=random_k", "ratio=0.1"],
    "threshold": ["method=threshold"],
    "power_sgd": ["method=power_sgd", "rank=2"],
    "all of top_k": ["method=top_k", "ratio=1.0"],
    "all of random_k": ["method=random_k", "ratio=1.0"],
    "all of threshold": ["method=threshold", "threshold=0.0"],
}
# Methods that `make test` runs: one of each kind (dtype, indices, factors), and one that loses nothing.
QUICK = ("none", "int8", "top_k", "power_sgd", "all of top_k")

RESUMED = ("top_k", "int8", "power_sgd")
SMALLER = {"two replicas of one rank": ["grid.dp_replicate=2"], "no replicas": ["grid.dp_shard=2"]}
