"""Watches a torch program that knows nothing of the cockpit: `cockpit wrap COMMAND` (docs/join/wrap.md).

`startup` is put in front of PYTHONPATH, so that each Python process of the command waits for the import of torch and
then installs `hooks`. A process that takes steps with an optimizer becomes a rank; no other process is affected. torch
is imported inside functions only, and only where the program has imported it.
"""
