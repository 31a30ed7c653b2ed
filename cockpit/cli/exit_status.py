"""Exit statuses of `cockpit`."""

import signal

DONE = 0
FAILED = 1
USAGE = 2  # not understood, or no such run
REFUSED = 3  # the run refused a change
INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + signal.SIGPIPE  # as of any filter whose reader has ended (`cockpit watch | head`)
