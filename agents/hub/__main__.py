"""Runs a hub as a process: `python -m agents.hub`."""

import sys

from agents.hub.process import main

sys.exit(main())
