"""Watches an unmodified torch program, for `cockpit wrap COMMAND` (docs/join/wrap.md).

`startup` is prepended to PYTHONPATH, so that each Python process of the command installs `hooks` when it imports torch.
A process that takes steps with an optimizer becomes a rank; other processes are not affected. This package imports
torch only inside functions, and only in processes where the program has imported torch.
"""
