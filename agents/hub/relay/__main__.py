"""Runs a relay as a process: `python -m agents.hub.relay`."""

import sys

from agents.hub.relay.process import main

sys.exit(main())
