"""Parser of the filter language, by recursive descent.

    filter     = and { "|" and }
    and        = not { "&" not }
    not        = "!" not | "(" filter ")" | flag | text ("=" | "!=") pattern | comparison
    comparison = sum ("=" | "!=" | "<" | "<=" | ">" | ">=") sum
    sum        = product { ("+" | "-") product }
    product    = factor { ("*" | "/") factor }
    factor     = "-" factor | number | name | statistic [ "(" name ")" ]

If a comparison names only one quantity, a statistic without an argument refers to this quantity:
``own_ms > 1.2 * median`` means ``own_ms > 1.2 * median(own_ms)``. If it names several, each statistic needs an
argument.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from cockpit.data.filter.syntax import (
    COMPARISONS,
    EQUALITIES,
    MOST_CHARACTERS,
    MOST_NESTED,
    SUFFIXES,
    All,
    Any,
    Arithmetic,
    Comparison,
    Condition,
    Expression,
    Filter,
    Flag,
    Name,
    Not,
    Number,
    Over,
    Text,
    Vocabulary,
)
from cockpit.data.format import clean

_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([kMGT]?)(?!\w)", re.ASCII)
_PATTERN = re.compile(r'"([^"]*)"|([^\s&|()!"]+)')
_ENDING = re.compile(r"\w*$", re.ASCII)
_SPACE = re.compile(r"\s*")
_COMPARISON = re.compile(r"==|[!<>]=|[=<>]")


class FilterError(ValueError):
    """Raised if a string is not a valid filter. `at`: the index of the first invalid character. `legal`: the words and
    symbols that are legal at that position. The error message states the problem, the column, and these words and
    symbols."""

    def __init__(self, problem: str, at: int, legal: Iterable[str] = ()) -> None:
        self.problem, self.at, self.legal = problem, at, tuple(legal)
        expected = f"; legal: {', '.join(self.legal)}" if self.legal else ""
        super().__init__(f"{problem} at column {at + 1}{expected}")


def parse(text: str, vocabulary: Vocabulary) -> Filter:
    """Parse `text` as a filter. Raises FilterError if `text` is not a valid filter."""
    if len(text) > MOST_CHARACTERS:
        raise FilterError(f"a filter has at most {MOST_CHARACTERS} characters: too long", MOST_CHARACTERS)
    return Filter(text.strip(), _Parser(text, vocabulary).filter())


def completions(text: str, vocabulary: Vocabulary) -> list[str]:
    """The words that may follow `text` or complete its last word."""
    ending = _ENDING.search(text)
    word = ending.group() if ending else ""
    try:
        parse(text[: len(text) - len(word)], vocabulary)
    except FilterError as error:
        at_end = not text[error.at : len(text) - len(word)].strip()
        legal = [name for name in error.legal if " " not in name] if at_end else []
        return [name for name in legal if name.startswith(word) and name != word]
    return [] if word else ["&", "|"]


class _Parser:
    """Parses a filter in one pass; each method parses one rule of the grammar and returns its subtree."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text, self._vocabulary = text, vocabulary
        self._at = 0
        self._depth = 0
        self._starts = (*vocabulary.numbers, *vocabulary.texts, *vocabulary.flags, "!", "(")

    # --------------------------------------------------------------------------------------- conditions

    def filter(self) -> Condition:
        found = self._any()
        if self._peek():
            raise self._unexpected("&", "|")
        return found

    def _any(self) -> Condition:
        parts = self._joined("|", self._all)
        return parts[0] if len(parts) == 1 else Any(parts)

    def _all(self) -> Condition:
        parts = self._joined("&", self._not)
        return parts[0] if len(parts) == 1 else All(parts)

    def _joined(self, sign: str, rule: Callable[[], Condition]) -> tuple[Condition, ...]:
        parts = [rule()]
        while self._take(sign):
            parts.append(rule())
        return tuple(parts)

    def _not(self) -> Condition:
        at = self._skip()
        if self._take("!"):
            return Not(self._nested(self._not, at))
        if self._take("("):
            found = self._nested(self._any, at)
            if not self._take(")"):
                raise self._unexpected(")", "&", "|")
            return found
        return self._test()

    def _nested(self, rule: Callable[[], Condition], at: int) -> Condition:
        if self._depth == MOST_NESTED:
            raise FilterError(f"more than {MOST_NESTED} nested ! and (", at)
        self._depth += 1
        found = rule()
        self._depth -= 1
        return found

    def _test(self) -> Condition:
        at = self._skip()
        word = _WORD.match(self._text, at)
        name = word.group() if word else ""
        if name in self._vocabulary.flags:
            self._at = at + len(name)
            return Flag(name)
        if name in self._vocabulary.texts:
            self._at = at + len(name)
            return self._text_test(name)
        return self._comparison(at)

    def _text_test(self, name: str) -> Text:
        sign = self._comparison_sign(EQUALITIES)
        at = self._skip()
        pattern = _PATTERN.match(self._text, at)
        if pattern is None:
            raise self._unexpected("a text such as node7, or n*")
        self._at = pattern.end()
        return Text(name, pattern.group(1) if pattern.group(1) is not None else pattern.group(2), sign == "=")

    def _comparison(self, at: int) -> Comparison:
        bare: list[int] = []
        left = self._sum(self._starts, bare)
        sign = self._comparison_sign((*COMPARISONS, "+", "-", "*", "/"))
        right = self._sum(("a number", *self._vocabulary.numbers, *self._vocabulary.statistics), bare)
        parts = [*_leaves(left), *_leaves(right)]
        if not any(isinstance(part, Name) for part in parts):
            raise FilterError(
                "a comparison needs the name of at least one number", at, self._vocabulary.numbers
            )
        names = list(dict.fromkeys(part.name for part in parts if not isinstance(part, Number) and part.name))
        if bare and len(names) > 1:
            statistic = next(
                word for word in self._vocabulary.statistics if self._text.startswith(word, bare[0])
            )
            problem = f"this comparison has several names, so one must be given: {statistic}(NAME)"
            raise FilterError(problem, bare[0], (f"{statistic}({name})" for name in names))
        return Comparison(_named(left, names[0]), sign, _named(right, names[0]))

    def _comparison_sign(self, legal: Iterable[str]) -> str:
        at = self._skip()
        found = _COMPARISON.match(self._text, at)
        sign = found.group() if found else ""
        same = "=" if sign == "==" else sign
        if same not in legal:
            raise self._unexpected(*legal)
        self._at = at + len(sign)
        return same

    # -------------------------------------------------------------------------------------- expressions

    def _sum(self, legal: Iterable[str], bare: list[int]) -> Expression:
        found = self._product(legal, bare)
        while sign := self._take("+") or self._take("-"):
            found = Arithmetic(sign, found, self._product(self._operands, bare))
        return found

    def _product(self, legal: Iterable[str], bare: list[int]) -> Expression:
        found = self._factor(legal, bare)
        while sign := self._take("*") or self._take("/"):
            found = Arithmetic(sign, found, self._factor(self._operands, bare))
        return found

    @property
    def _operands(self) -> tuple[str, ...]:
        return ("a number", *self._vocabulary.numbers, *self._vocabulary.statistics)

    def _factor(self, legal: Iterable[str], bare: list[int]) -> Expression:
        negative = False
        while self._take("-"):
            negative = not negative
        found = self._operand(legal, bare)
        return Arithmetic("-", Number(0.0), found) if negative else found

    def _operand(self, legal: Iterable[str], bare: list[int]) -> Expression:
        at = self._skip()
        number = _NUMBER.match(self._text, at)
        if number:
            self._at = number.end()
            value = float(number.group(1)) * SUFFIXES[number.group(2)]
            if value == float("inf"):
                raise FilterError(f"{number.group()} is too large", at)
            return Number(value)
        word = _WORD.match(self._text, at)
        name = word.group() if word else ""
        if name in self._vocabulary.statistics:
            self._at = at + len(name)
            return self._over(name, at, bare)
        if name not in self._vocabulary.numbers:
            raise self._unexpected(*legal)
        self._at = at + len(name)
        return Name(name)

    def _over(self, statistic: str, at: int, bare: list[int]) -> Over:
        if not self._take("("):
            bare.append(at)
            return Over(statistic, "")
        start = self._skip()
        word = _WORD.match(self._text, start)
        name = word.group() if word else ""
        if name not in self._vocabulary.numbers:
            raise self._unexpected(*self._vocabulary.numbers)
        self._at = start + len(name)
        if not self._take(")"):
            raise self._unexpected(")")
        return Over(statistic, name)

    # ------------------------------------------------------------------------------------------- reading

    def _skip(self) -> int:
        """Skip spaces; return the index of the next character."""
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at

    def _peek(self) -> str:
        return self._text[self._skip() :][:1]

    def _take(self, sign: str) -> str:
        """Consume `sign` if it comes next; return the sign, or "" if something else comes next."""
        if self._peek() != sign:
            return ""
        self._at += 1
        return sign

    def _unexpected(self, *legal: str) -> FilterError:
        at = self._skip()
        rest = self._text[at:]
        word = re.match(r"\w+", rest)
        shown = clean(word.group() if word else rest[:1])[:24]
        return FilterError(f"{shown!r} is not expected" if rest else "the filter is incomplete", at, legal)


def _leaves(expression: Expression) -> Iterator[Number | Name | Over]:
    stack = [expression]
    while stack:
        one = stack.pop()
        if isinstance(one, Arithmetic):
            stack += (one.right, one.left)
        else:
            yield one


def _named(expression: Expression, name: str) -> Expression:
    """The expression, in which each statistic without an argument, such as ``median``, gets the argument `name`."""
    match expression:
        case Arithmetic(sign, left, right):
            return Arithmetic(sign, _named(left, name), _named(right, name))
        case Over(statistic, ""):
            return Over(statistic, name)
    return expression
