"""A short fuzz run with fixed seeds, and all inputs that made a target fail in earlier fuzz runs. For longer runs, use
`python -m tests.fuzz`."""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import inputs
from tests.fuzz.__main__ import again
from tests.fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"
SHORT = {"decode": 4000, "hub": 400, "client": 400, "link": 400, "relay": 400, "files": 100}


@pytest.mark.parametrize("name", TARGETS)
def test_random_mutations(name: str) -> None:
    random, target = Random(1), TARGETS[name]()
    pool = inputs.seeds(name)
    for data in pool:
        target.feed(data)
    for _ in range(SHORT[name]):
        data = inputs.changed(name, random.choice(pool), random)
        target.feed(data)
        pool[random.randrange(len(pool))] = data
    target.close()


@pytest.mark.parametrize("name", TARGETS)
def test_hypothesis_inputs(name: str) -> None:
    pool = inputs.seeds(name)

    @settings(max_examples=30, derandomize=True, database=None)
    @given(st.randoms(use_true_random=False))
    def holds(random: Random) -> None:
        # Each example has a new target, so that a failure depends only on its inputs. The target is closed even if
        # hypothesis stops early.
        with closing(TARGETS[name]()) as target:
            for _ in range(5):
                target.feed(inputs.changed(name, random.choice(pool), random))

    holds()


@pytest.mark.parametrize(
    "path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_inputs_of_earlier_findings(path: Path) -> None:
    target = TARGETS[path.parent.name]()
    target.feed(path.read_bytes())
    target.close()


def test_a_finding_is_reproducible(tmp_path: Path) -> None:
    data = inputs.seeds("hub")[:3]
    finding = tmp_path / "hub.found"
    finding.write_bytes(b"".join(len(one).to_bytes(4) + one for one in data))
    assert again(finding) == 0
