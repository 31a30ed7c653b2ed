"""Draws a preview as lines: first the quantities that would change, each with the source of its estimate; then the
unknown quantities; then the unchanged quantities. An unknown quantity is never shown as zero."""

from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType

from rich.cells import cell_len
from rich.style import Style

from agents.protocol import Estimate, Previewed
from agents.state.preview_checks import Trust
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.diagnosis.evidence import trust_text
from cockpit.data.quantities import MORE_IS_BETTER, NumberFormat, label_and_format, share
from cockpit.tui.drawing.strips import StripLine, paragraph
from cockpit.tui.drawing.theme import Palette

NOTHING_CHECKED: Mapping[str, Trust] = MappingProxyType({})
LABEL = 13  # columns
NUMBER = 7
NEW_VALUE = 24
CHANGE = 17
NO_DATA = "no data: "
LEAST_SOURCE = 16  # minimum columns for a source beside its numbers
ROOMY = 92  # minimum width at which the change is also shown as a percentage


def estimate_lines(
    found: Previewed, width: int, height: int, colours: Palette, trusts: Mapping[str, Trust] = NOTHING_CHECKED
) -> list[StripLine]:
    """The preview in at most `height` lines. If not all lines fit, the last line says how many are hidden. `trusts`:
    for each quantity, how often earlier previews predicted it correctly."""
    if found.why:
        bad = colours.level[Level.BAD]
        return [StripLine().add(f"  {Level.BAD.value} ", bad).add(format.clean(found.why), colours.text)]
    changed = [one for one in found.estimates if _differs(one)]
    unknown = [one for one in found.estimates if not one.known]
    unchanged = [one for one in found.estimates if one.known and not _differs(one)]
    known = [_row(one, width, colours, trust_text(trusts.get(one.quantity))) for one in changed]
    groups = _groups("no data", unknown, width, colours) + _groups("as now", unchanged, width, colours)
    if not known and not groups:
        return [StripLine().add(f"  {format.MISSING} the run has no estimate for this", colours.faint)]
    lines, spare = [], height - len(known) - len(groups)
    below: dict[str, list[str]] = {}  # sources that do not fit beside their numbers, with their quantities
    for one, (numbers, source) in zip(changed, known, strict=True):
        row = _full_row(numbers, source, width, colours)
        if row is None or len(row) - 1 > spare:
            row = [numbers]  # half a source would say nothing
            below.setdefault(source, []).append(label_and_format(one.quantity)[0])
        spare -= len(row) - 1
        lines += row
    lines += groups
    sources = [
        line
        for source, labels in below.items()
        for line in paragraph(f"{', '.join(labels)}: {source}", width, colours.dim, 2, hanging=4)
    ]
    lines += sources if len(lines) + len(sources) <= height else []
    if len(lines) > height > 0:
        rest = len(lines) - height + 1
        lines = [
            *lines[: height - 1],
            StripLine().add(f"  … {rest} more lines; enlarge the window", colours.faint),
        ]
    return lines


def _full_row(numbers: StripLine, source: str, width: int, colours: Palette) -> list[StripLine] | None:
    """The row of an estimate: the numbers and, beside them, `source` (how the value was estimated), wrapped over
    several lines; None if there is no room for `source` beside the numbers."""
    at = numbers.width
    if width - at < LEAST_SOURCE:
        return None
    first, *more = format.wrapped(source, max(20, width - at)) or [""]
    line = StripLine().extend(numbers).add(first, colours.dim)
    return [line, *(StripLine().pad_to(at, colours.text).add(part, colours.dim) for part in more)]


def _differs(one: Estimate) -> bool:
    return one.known and not (one.point == one.now and one.interval in (None, (one.now, one.now)))


def _row(one: Estimate, width: int, colours: Palette, trust: str) -> tuple[StripLine, str]:
    """The row of one estimate, and the source of the estimate as text. An example of a row is ``step time  346 → 309 ..
    952 ms (400)  -11 .. +175 %``, with the point estimate in brackets."""
    formatted = label_and_format(one.quantity)[1]
    text, unit = _new_value(one, formatted)
    now, now_unit = (format.MISSING, unit) if one.now is None else formatted(one.now)
    before = now if now_unit == unit else f"{now} {now_unit}"
    line = (
        StripLine()
        .add(f"  {label_and_format(one.quantity)[0]:<{LABEL}}", colours.text)
        .add(before.rjust(NUMBER), colours.dim)
    )
    line.add(" → ", colours.faint).add(text, _tone(one, colours)).add(f" {unit}", colours.dim)
    if one.interval and one.point is not None:
        line.add(f" ({formatted(one.point)[0]})", colours.dim)
    at = 2 + LABEL + NUMBER + 3 + NEW_VALUE
    line.pad_to(at, colours.text)
    if width >= ROOMY:
        line.add(" ", colours.text).add(_change(one).rjust(CHANGE - 1), _tone(one, colours))
        at += CHANGE
    source = f"{trust} · {one.source}" if trust else one.source
    return line.pad_to(at, colours.text).add("  ", colours.text), format.clean(source)


def _new_value(one: Estimate, formatted: NumberFormat) -> tuple[str, str]:
    """The predicted value as text, and its unit: the interval if there is one, otherwise the single value. The unit of
    an interval is that of its upper end."""
    if one.interval is None:
        assert one.after is not None
        return formatted(one.after)
    (low, low_unit), (high, unit) = map(formatted, one.interval)
    return f"{low if low_unit == unit else f'{low} {low_unit}'} .. {high}", unit


def _change(one: Estimate) -> str:
    """The change as a percentage of the current value; for a fraction, in percentage points."""
    ends = one.interval if one.point is None else (one.point,)
    if one.now is None or ends is None:
        return ""
    if label_and_format(one.quantity)[1] is share:
        return " .. ".join(format.signed(100 * (end - one.now), 1) for end in ends) + " pt"
    digits = 1 if len(ends) == 1 else 0
    return (
        " .. ".join(format.signed(100 * (end / one.now - 1), digits) for end in ends) + " %"
        if one.now
        else ""
    )


def _tone(one: Estimate, colours: Palette) -> Style:
    """The style of a predicted value: "better" or "worse" if the whole interval is better or worse than the current
    value, otherwise neutral. A change that is rounded to zero is neutral too."""
    change = _change(one)
    if not one.direction or (change and not any(digit in change for digit in "123456789")):
        return colours.strong
    better = (one.direction < 0) != (one.quantity in MORE_IS_BETTER)
    return colours.level[Level.GOOD if better else Level.WARN]


def _groups(label: str, estimates: list[Estimate], width: int, colours: Palette) -> list[StripLine]:
    """One line for each group of estimates with the same source. The source says how the values were estimated or, if
    they are unknown, why. A line lists the quantities, then the source, such as
    ``no data  step time, bubble · ranks share cores``. A source that does not fit beside its quantities is written
    below them."""
    lines: list[StripLine] = []
    for source, of in groupby(sorted(estimates, key=_source), _source):
        line = StripLine().add(f"  {label if not lines else '':<{LABEL}}", colours.faint)
        line.add(", ".join(label_and_format(one.quantity)[0] for one in of), colours.text)
        beside = f" · {source}" if source else ""
        fits = line.width + cell_len(beside) <= width
        lines.append(line.add(beside if fits else "", colours.dim))
        lines += [] if fits else paragraph(source, width, colours.dim, 2 + LABEL)
    return lines


def _source(one: Estimate) -> str:
    return format.clean(one.source).removeprefix(NO_DATA)
