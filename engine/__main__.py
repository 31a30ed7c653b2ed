"""``python -m engine`` and ``torchrun -m engine``."""

from engine.cli import main

main()
