"""Exit statuses of `cockpit`."""

import signal

DONE = 0
FAILED = 1
USAGE = 2  # invalid command line, or no such run
REFUSED = 3  # the run refused a change
SURPRISED = 4  # the autopilot stopped at an unexpected event
INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + signal.SIGPIPE  # the process that reads the output has ended (`cockpit watch | head`)
