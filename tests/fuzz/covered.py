"""Measures with Python's tracing which lines of `agents` the inputs in a corpus execute; needs no fuzzer.

python -m tests.fuzz.covered TARGET CORPUS
"""

import dis
import inspect
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import agents
from tests.fuzz import targets

HOME = str(Path(agents.__file__).parent)
RENEWED = 250


def lines_of(code: CodeType) -> set[int]:
    """The line numbers of all functions in a module's code object. Module and class bodies run at import, so their
    lines are not included."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    functions = [one for one in inner if one.co_flags & inspect.CO_NEWLOCALS]
    found = {
        line
        for one in functions
        for _, line in dis.findlinestarts(one)
        if line and line != one.co_firstlineno
    }
    return found.union(*map(lines_of, inner))


def covered(name: str, corpus: Path) -> dict[str, tuple[set[int], set[int]]]:
    """Run the inputs in `corpus`. Returns two sets of line numbers for the source file of each executed module: the
    executed lines, and the lines of all functions in the module."""
    reached: dict[str, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        reached[frame.f_code.co_filename].add(frame.f_lineno)
        return trace

    target = targets.TARGETS[name]()
    sys.settrace(trace)
    try:
        for count, path in enumerate(sorted(corpus.iterdir()), 1):
            target.feed(path.read_bytes())
            if count % RENEWED == 0:
                target.close()
                target = targets.TARGETS[name]()
    finally:
        sys.settrace(None)
        target.close()
    lines = {file: lines_of(compile(Path(file).read_text(), file, "exec")) for file in reached}
    return {file: (reached[file] & lines[file], lines[file]) for file in reached}


if __name__ == "__main__":
    for file, (reached, lines) in sorted(covered(sys.argv[1], Path(sys.argv[2])).items()):
        missing = " ".join(map(str, sorted(lines - reached)))
        print(f"{Path(file).name:16} {len(reached) / len(lines):4.0%} of {len(lines):3}  not: {missing}")
