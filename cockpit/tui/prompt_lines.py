"""The prompts in which the user types a filter, the target of a jump or the text of a mark. Each prompt checks the
typed text after every key press. This module does not import Textual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.filter import FilterError, completions, count_text, matches, parse, vocabulary
from cockpit.data.navigation.jump import LEGAL, JumpError, jump_completions, parse_jump
from cockpit.data.store import Store
from cockpit.tui.navigation import Navigator


@dataclass(frozen=True)
class Judged:
    """Feedback on what the user has typed: a count beside the input line, a line above it, and suggestions for the next
    word."""

    count: str = ""
    hint: str = ""
    level: Level = Level.NOTE
    words: Sequence[str] = ()


Deed = Callable[[], str]
"""The action to run once the prompt is closed; it returns a sentence for the user, or ""."""


def nothing() -> str:
    return ""


class PromptLine(Protocol):
    """A prompt for one kind of input, such as a filter or the target of a jump."""

    SIGN: ClassVar[str]
    ESCAPE: ClassVar[str]  # what Escape does in this prompt
    text: str  # the text at the start

    def judge(self, store: Store, text: str) -> Judged:
        """Feedback on `text`, which may be unfinished. The caller holds the store's lock."""
        ...

    def enter(self, text: str) -> Deed:
        """The action to run when the user presses Enter, for the typed `text`. Raises one of the exceptions in
        `navigation.Refused`."""
        ...

    def escape(self) -> Deed:
        """The action to run when the user leaves the prompt with Escape."""
        ...


class FilterLine:
    """The prompt for a filter of ranks. The prompt shows how many ranks match."""

    SIGN: ClassVar[str] = "/"
    ESCAPE: ClassVar[str] = "esc removes the filter"

    def __init__(self, navigator: Navigator) -> None:
        self._navigator = navigator
        applied = navigator.session.selection.filter
        self.text = applied.text if applied else ""

    def judge(self, store: Store, text: str) -> Judged:
        names = vocabulary(store)
        words = completions(text, names)
        if not text.strip():
            return Judged(
                format.counted(store.world, "rank"), "such as pp=1 & own_ms > 1.2 * median", words=words
            )
        try:
            step = self._navigator.session.selection.step
            found = matches(store, parse(text, names), step, use="typed")
        except FilterError as error:
            if error.at >= len(text.rstrip()) or words:
                return Judged(words=words)
            return Judged(hint=str(error), level=Level.WARN)
        level = Level.GOOD if found.ranks else Level.WARN
        return Judged(count_text(store, found), level=level, words=words)

    def enter(self, text: str) -> Deed:
        return partial(self._navigator.filter, self._navigator.parse_filter(text))

    def escape(self) -> Deed:
        return partial(self._navigator.filter, None)


class JumpLine:
    """The prompt for a jump to a step, a rank, an expert, a mark or a screen."""

    SIGN: ClassVar[str] = ":"
    ESCAPE: ClassVar[str] = "esc closes"
    text = ""

    def __init__(self, navigator: Navigator, any_step: bool) -> None:
        self._navigator, self._any_step = navigator, any_step

    def judge(self, store: Store, text: str) -> Judged:
        words = jump_completions(text, store, self._navigator.screens)
        if not text.strip():
            return Judged(hint=LEGAL, words=words)
        try:
            jump = parse_jump(text, store, self._navigator.screens, self._any_step)
        except JumpError as error:
            return Judged(words=words) if words else Judged(hint=str(error), level=Level.WARN)
        return Judged(f"go to {jump.text}", level=Level.GOOD, words=words)

    def enter(self, text: str) -> Deed:
        return partial(self._navigator.go, self._navigator.parse_jump(text)) if text.strip() else nothing

    def escape(self) -> Deed:
        return nothing


class MarkLine:
    """The prompt for the name and the note of a mark at the selected step."""

    SIGN: ClassVar[str] = "'"
    ESCAPE: ClassVar[str] = "esc closes"

    def __init__(self, navigator: Navigator) -> None:
        self._navigator = navigator
        self.text = f"{navigator.session.store.named_marks.free_name()} "

    def judge(self, store: Store, text: str) -> Judged:
        selected = self._navigator.session.selection.step
        step = store.step if selected is None else selected
        name = text.split(maxsplit=1)[0] if text.strip() else ""
        old = store.named_marks.get(name)
        moves = f" · moves {old.text} from step {format.grouped(old.step)}" if old else ""
        hint = f"a mark: its name, and a note{moves}"
        return Judged(f"at step {format.grouped(step)}" if step is not None else "", hint)

    def enter(self, text: str) -> Deed:
        said = self._navigator.mark(text) if text.strip() else ""
        return lambda: said

    def escape(self) -> Deed:
        return nothing
