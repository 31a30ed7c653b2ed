"""`python -m agents.hub`: a hub as a process."""

import sys

from agents.hub.process import main

sys.exit(main())
