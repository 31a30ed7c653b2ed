"""The documentation names only paths, links and options that exist."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cockpit.cli.parser import parser as cockpit
from engine.cli.main import parser as engine

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", ".github/**/*.md", "docs/**/*.md", "layouts/*.toml", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
FOLDERS = ("agents", "cockpit", "docs", "engine", "layouts", "tests")
SOURCES = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} - {Path(__file__)}
OPTIONS = frozenset(
    option for path in SOURCES for option in re.findall(r'"(--[a-z][\w-]*)"', path.read_text())
)
# Options of torchrun, pytest, Slurm, kubectl, pipx and example programs.
FOREIGN = {"--dist", "--durations", "--gpus-per-task", "--max-restarts", "--nnodes", "--nproc-per-node"}
FOREIGN |= {"--from-file", "--gpus-per-node", "--kill-on-bad-exit", "--no-requeue", "--signal"}
FOREIGN |= {
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--spec",
    "--standalone",
    "--lr",
    "--node-rank",
    "--master-addr",
    "--master-port",
}
# files of the user's configuration, and a page of other repositories
NOT_FILES = {
    "cockpit/keys",
    "docs/performance-summary",
}

PAGE = re.compile(r"(?<![\w./~-])docs(?:/[\w.-]+)+\.(?:md|svg)")
PATH = re.compile(rf"(?<![\w./~-])(?:{'|'.join(FOLDERS)})(?:/[\w-][\w.-]*)+(?<!\.)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    missing = [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert set(missing) <= NOT_FILES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked)


def test_pages_named_in_sources_exist() -> None:
    missing = {
        (name(source), page)
        for source in [*SOURCES, ROOT / "Makefile", *ROOT.glob("layouts/**/*.toml")]
        for page in PAGE.findall(source.read_text())
        if not (ROOT / page).exists()
    }
    assert not missing


def test_the_site_has_each_page() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert len(listed) == len(pages) and {*listed} == pages


@pytest.mark.parametrize("command", ["cockpit", "engine"])
def test_man_pages_have_each_option(command: str) -> None:
    """If this test fails because an option has changed, run `make man`."""
    page = (ROOT / "docs" / "man" / f"{command}.1").read_text().replace("\\-", "-")
    missing = [text for text in spelled(cockpit() if command == "cockpit" else engine()) if text not in page]
    assert not missing, "regenerate the man pages: make man"


def spelled(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the commands and the options of a parser, except options that the help does not show."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner.prog
                yield from spelled(inner)
        elif action.help != argparse.SUPPRESS and action.dest != "help":
            yield from action.option_strings


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert named <= OPTIONS | FOREIGN


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
