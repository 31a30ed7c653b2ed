"""Shell completion of the commands `engine` and `cockpit`, generated from their argument parsers by shtab."""

import argparse
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")
ABOUT = "print the completion of this command for a shell"
EPILOG = (
    'bash: eval "$(PROG completion bash)" in ~/.bashrc. zsh: eval "$(PROG completion zsh)" in ~/.zshrc, after '
    "compinit. fish: PROG completion fish > ~/.config/fish/completions/PROG.fish"
)
Completion = dict[str, Any]  # how shtab completes an argument, by shell

FILES: Completion = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path)"}
FOLDERS: Completion = {
    "bash": "_shtab_compgen_dirs",
    "zsh": "_files -/",
    "fish": "(__fish_complete_directories)",
}
NO_SPACE = """
_{name}_completion() {{ # no space after `key=`
  _shtab_{name} "$@"
  [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  return 0
}}
complete -o bashdefault -F _{name}_completion {prog}
"""


def add_options(parser: argparse.ArgumentParser, prog: str) -> None:
    """Add the arguments of the `completion` command to its parser."""
    parser.description, parser.epilog = ABOUT, EPILOG.replace("PROG", prog)
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def one_of(words: Sequence[str], files: bool = False) -> Completion:
    """A completion that offers `words` and, if `files` is True, TOML files."""
    listed = " ".join(words)
    name = f"_{'file' if files else 'word'}s_{hashlib.sha256(listed.encode()).hexdigest()[:8]}"
    lines = [f"{name}() {{", f'  compgen -W {shlex.quote(listed)} -- "$1"']
    lines += ['  compgen -f -X "!*.toml" -- "$1"', '  compgen -d -- "$1"'] if files else []
    keys = [word for word in words if word.endswith("=")]
    others = [word for word in words if not word.endswith("=")]
    added = [f"compadd -S '' -- {' '.join(keys)}"] * bool(keys) + [f"compadd -- {' '.join(others)}"] * bool(
        others
    )
    return {
        "bash": name,
        "zsh": "{" + "; ".join([*added, *["_files -g '*.toml'"] * files]) + "}",
        "fish": f"(printf '%s\\n' {listed}{'; __fish_complete_suffix .toml' if files else ''})",
        "preamble": {"bash": "\n".join([*lines, "}"])},
    }


def script(parser: argparse.ArgumentParser, shell: str, completions: Mapping[str, Completion]) -> str:
    """The completion script of `parser` for `shell`. A key of `completions` has the form `argument` or
    `command.argument`. Modifies `parser`. Raises ModuleNotFoundError if shtab is not installed."""
    import shtab

    _mark(parser, completions)
    text: str = shtab.complete(parser, shell)
    return text + (NO_SPACE.format(name=parser.prog, prog=parser.prog) if shell == "bash" else "\n")


def _mark(parser: argparse.ArgumentParser, completions: Mapping[str, Completion]) -> None:
    command = parser.prog.split()[-1]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _mark(inner, completions)
        elif action.choices is None and (
            found := completions.get(f"{command}.{action.dest}", completions.get(action.dest))
        ):
            action.complete = found  # type: ignore[attr-defined]
        if not action.option_strings and action.nargs == "?":
            action.nargs = None  # after an optional argument, shtab would not complete the next one


def layout_keys() -> list[str]:
    """Every key of a layout as `section.key`."""
    from engine.config.layout import Layout

    return _keys(Layout, "")


def _keys(kind: Any, at: str) -> list[str]:
    from engine.config.types import keys, section_in

    found: list[str] = []
    for key, (hint, _) in keys(kind).items():
        section = section_in(hint)
        found += _keys(section, f"{at}{key}.") if section else [f"{at}{key}"]
    return found
