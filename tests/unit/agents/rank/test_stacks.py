"""The stacks of a process: the training thread comes first, and long stacks are shortened. If reading a source file or
the program's recorder of collectives hangs, the agent waits only briefly, and then answers without the source lines
or the recorder's text."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.loop.adapters.patches import Patches
from agents.protocol import Pulse, RankStacks, StackQuery, codec
from agents.protocol.stacks import MOST_FRAMES
from agents.rank import stacks as stacks_module
from agents.rank.stacks import OUTERMOST, Stacks
from agents.wrap.hooks import Hooks

PULSE = Pulse(3, 7, "all-reduce", 1.0)


class Trainer:
    """A thread that blocks inside `depth` nested calls, like a training thread in a collective."""

    def __init__(self, depth: int = 0) -> None:
        self.release, self.ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.dive, args=(depth,), name=f"trainer {depth}")
        self.thread.start()
        assert self.ready.wait(30)

    def dive(self, depth: int) -> None:
        if depth:
            return self.dive(depth - 1)
        self.ready.set()
        self.release.wait(60)  # waits here
        return None


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    yield from _trainer(0)


@pytest.fixture
def deep() -> Iterator[Trainer]:
    yield from _trainer(200)


def _trainer(depth: int) -> Iterator[Trainer]:
    one = Trainer(depth)
    yield one
    one.release.set()
    one.thread.join(30)


def answer(trainer: Trainer, **query: bool) -> RankStacks:
    found = Stacks(trainer.thread.ident or 0).answer(StackQuery("q", **query), PULSE)
    assert found
    codec.decode(codec.encode([found]))  # a hub can decode it
    return found


def test_the_training_thread_is_at_its_line(trainer: Trainer, deep: Trainer) -> None:
    found = answer(trainer)
    (thread,) = found.threads
    own = [one for one in thread.frames if not one.installed]
    assert (found.rank, found.step, found.doing) == (3, 7, "all-reduce")
    assert own[-1].code == "self.release.wait(60)  # waits here"
    assert own[-1].file == __file__ and own[-1].function.endswith("dive")
    assert thread.frames[-1].installed and thread.frames[-1].function.endswith("wait")
    everything = answer(trainer, threads=True).threads
    assert everything[0] == thread and deep.thread.name in [one.name for one in everything[1:]]


def test_hooks_are_left_out_and_the_rest_of_agents_is_not_the_programs_own_code() -> None:
    pytest.importorskip("torch")
    release, ready = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        release.wait(60)

    class Owner:
        collective = staticmethod(wait)

    hooks, patches = Hooks(), Patches()
    hooks.wrap(Owner, "collective", lambda original, *_: original())
    owner = Owner()
    patches.wrap(owner, "collective", lambda original, *_: original())
    thread = threading.Thread(target=lambda: owner.collective())
    thread.start()
    try:
        assert ready.wait(30)
        found = Stacks(thread.ident or 0).answer(StackQuery("q"), PULSE)
        assert found
        frames = found.threads[0].frames
        assert [one.installed for one in frames if one.file.endswith("adapters/patches.py")] == [True]
        assert not [one for one in frames if "/wrap/hooks.py" in one.file]
        assert [one.file for one in frames if not one.installed] == [__file__] * 4
    finally:
        release.set()
        thread.join(30)


def test_a_deep_stack_keeps_both_ends(deep: Trainer) -> None:
    (thread,) = answer(deep).threads
    assert len(thread.frames) == MOST_FRAMES and thread.gap == OUTERMOST and thread.omitted > 100
    assert "_bootstrap" in thread.frames[0].function and thread.frames[-1].function.endswith("wait")


def test_a_hanging_file_or_recorder_only_costs_the_lines(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks_module, "PERIOD_S", 0.0)
    monkeypatch.setattr(stacks_module, "READ_S", 0.05)
    stacks = Stacks(trainer.thread.ident or 0)
    stacks.recorder = lambda: "late" if trainer.release.wait(60) else "never"
    for _ in range(2):  # the second answer does not start a second reader
        readers = threading.active_count()
        found = stacks.answer(StackQuery("q"), PULSE)
        assert found and found.collective == "" and {one.code for one in found.threads[0].frames} == {""}
        assert found.threads[0].frames[-1].line > 0
    assert threading.active_count() == readers


def test_a_failing_recorder_is_named_and_answers_are_rare(trainer: Trainer) -> None:
    stacks = Stacks(trainer.thread.ident or 0)
    stacks.recorder = lambda: [][0]
    found = stacks.answer(StackQuery("q"), PULSE)
    assert found and "the recorder of collectives failed: IndexError" in found.collective
    assert stacks.answer(StackQuery("r"), PULSE) is None


def test_a_line_that_changed_since_the_start_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited.py"
    file.write_text("import threading\n\ndef stand(ready, release):\n    ready.set()\n    release.wait(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited  # type: ignore[import-not-found]

    ready, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=edited.stand, args=(ready, release))
    thread.start()
    try:
        assert ready.wait(30)
        stacks = Stacks(thread.ident or 0)
        stacks._began_s = file.stat().st_mtime - 1
        found = stacks.answer(StackQuery("q"), PULSE)
        assert found
        (line,) = (one for one in found.threads[0].frames if one.file == str(file))
        assert line.code == "" and line.line == 5
    finally:
        release.set()
        thread.join(30)
        sys.modules.pop("edited", None)
