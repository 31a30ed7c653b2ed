"""``python -m cockpit``."""

from cockpit.cli import main

main()
