"""The user's keys and settings: which files are refused, and the page of all keys."""

from pathlib import Path

import pytest

import cockpit
from cockpit.tui.keys.all_bindings import BY_ID
from cockpit.tui.keys.key_table import table
from cockpit.tui.keys.user_keymap import KeymapError, conflicts, load_keymap
from cockpit.tui.settings import Settings, SettingsError, load_settings

ROOT = Path(cockpit.__file__).parent.parent


def test_every_action_has_a_key_of_its_own_in_every_place() -> None:
    """A panel may give enter and escape a meaning of its own. A panel may rebind another action's key only if that
    action keeps at least one other key."""
    shadowed: dict[tuple[str, str], set[str]] = {}
    for one in conflicts({}):
        shadowed.setdefault((one.place, one.first), set()).add(one.key)
    lost = {id for (_, id), keys in shadowed.items() if keys >= set(BY_ID[id].keys.split(","))}
    assert lost <= {"panel.open", "panel.back"}


@pytest.mark.parametrize(
    ("line", "keymap"),
    [
        ('"app.save" = "f5"', {"app.screenshot": "f5"}),
        ('"app.help" = "?, f2"', {"app.help": "question_mark,f2"}),
        ('"app.knobs" = "ctrl+x"', {"app.knobs": "ctrl+x"}),
        ('"app.knobs" = "f5"\n"ranks.metric" = "k"', {"app.knobs": "f5", "ranks.metric": "k"}),
        ('"board.try" = "k"', {"board.try": "k"}),
        ('"app.freeze" = "semicolon"', {"app.freeze": "semicolon"}),
    ],
)
def test_keymaps(tmp_path: Path, line: str, keymap: dict[str, str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(line)
    assert load_keymap(path) == keymap


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            '"app.knobs" = "m"\n"charts.metrics" = "f7"',
            "the key m would be both app.knobs (knobs) and experts.metric (metric) in experts; give one of them",
        ),
        ('"app.theme" = "comma"', "the key , would be both app.theme (theme) and replay.back (step back) in"),
        ('"app.theme" = "1"', "the key 1 would be both screen.overview (Overview) and app.theme (theme)"),
        ('"app.theme" = "nokey"', "app.theme has no key 'nokey'; legal: x, ?, f2"),
        ('"app.theme" = "x,,y"', "app.theme has no key ''"),
        ('"app.theme" = " "', "app.theme has no key ''"),
        ('"app.theme" = ["x"]', "app.theme must be one of"),
        ('"app.\\u001b[2J" = "x"', "app. [2J must be one of"),
    ],
)
def test_a_wrong_keymap_gets_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(line)
    with pytest.raises(KeymapError) as caught:
        load_keymap(path)
    assert sentence in str(caught.value) and str(caught.value).isprintable()


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    assert load_settings(path) == Settings()
    path.write_text('theme = "cockpit-light"')
    assert load_settings(path).theme == "cockpit-light"
    for text, sentence in (
        ("theme = 3", "theme must be one of cockpit-dark, cockpit-light"),
        ('colour = "x"', "colour is not a setting; legal: theme"),
        ("theme", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=sentence):
            load_settings(path)


def test_the_page_of_keys_is_up_to_date() -> None:
    page = (ROOT / "docs" / "operate" / "keys.md").read_text()
    assert page == table(), "write it again: python -m cockpit.tui.keys.key_table > docs/operate/keys.md"
