"""`python -m agents.hub.relay`: a relay as a process."""

import sys

from agents.hub.relay.process import main

sys.exit(main())
