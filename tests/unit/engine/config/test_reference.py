"""The reference of layout keys is complete, and docs/train/layout.md is identical to it."""

from pathlib import Path

import msgspec

from engine.cli.reference import reference
from engine.config.layout import Layout
from engine.config.toml import load, to_toml
from engine.config.types import keys, section_in
from tests.unit.engine.config.test_layout import DEMO

DOCS = Path(__file__).parents[4] / "docs" / "train" / "layout.md"


def test_the_page_equals_the_commands_output() -> None:
    assert DOCS.read_text() == reference(), "engine reference > docs/train/layout.md"


def test_every_key_has_a_row_with_its_meaning() -> None:
    text, sections = reference(), {"": Layout}
    while sections:
        name, kind = sections.popitem()
        for key, (hint, meaning) in keys(kind).items():
            where = f"{name}.{key}" if name else key
            if section := section_in(hint):
                sections[where] = section
                about = " ".join((section.__doc__ or "").split())
                assert f"## [{where}]\n\n{about}\n" in text
            else:
                assert meaning, f"{where} has no meaning"
                assert f"\n| `{key}` | " in text and f" | {meaning} |\n" in text


def test_a_description_does_not_change_what_is_read() -> None:
    demo = load(DEMO)
    assert msgspec.json.decode(msgspec.json.encode(demo), type=Layout) == demo
    assert '"' in to_toml(demo)
