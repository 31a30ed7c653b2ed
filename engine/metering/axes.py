"""The axes over which a rank's traffic is counted. Torch-free."""

AXES = ("dp", "tp", "pp", "ep", "cp", "control")
