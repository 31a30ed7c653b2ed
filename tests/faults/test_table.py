"""The table of faults is whole and true."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_of_the_twenty_faults_has_a_test() -> None:
    rows = [
        line
        for line in (TESTS.parent / "docs/faults.md").read_text().splitlines()
        if re.match(r"\| \d", line)
    ]
    assert sorted(int(re.match(r"\| (\d+)", row)[1]) for row in rows) == list(range(1, 21))  # type: ignore[index]
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row.rsplit("|", 2)[1])
        assert named and all((TESTS / one).is_file() for one in named), row
