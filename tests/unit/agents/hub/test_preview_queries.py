"""Preview queries: their rate is limited, and each answer goes to the client that asked."""

import pytest

from agents.hub.commands.preview_queries import QUERIES_PER_S, RETRY_S, PreviewQueries
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import PREVIEWS, Board, Message, Preview, Previewed
from tests.unit.agents.fleet import make_hello

Told = list[tuple[bytes, Message]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def questions(told: Told) -> PreviewQueries:
    update_log, membership = UpdateLog(), Membership("r")
    membership.hello(b"leader", make_hello(0, 1, capabilities=[PREVIEWS]), 0.0)
    update_log.publish(Board(0, 0, "d", []))
    return PreviewQueries(update_log, membership, lambda peer, message: told.append((peer, message)))


def _ask(id: str) -> Preview:
    return Preview(id, {"lr": 1})


def test_a_client_has_one_open_query(questions: PreviewQueries, told: Told) -> None:
    for id in ("a", "b", "a"):
        questions.ask(b"c", _ask(id), 10.0)
    assert told == [(b"leader", _ask("a"))]
    questions.answer(Previewed("a", {"lr": 1}, 0))
    questions.ask(b"c", _ask("b"), 10.1)
    questions.ask(b"c", _ask("b"), 10.2 + RETRY_S)
    assert told[1:] == [(b"c", Previewed("a", {"lr": 1}, 0)), *[(b"leader", _ask("b"))] * 2]


def test_the_total_rate_of_queries_is_bounded(questions: PreviewQueries, told: Told) -> None:
    for number in range(100):
        questions.ask(b"c%d" % number, _ask(f"q{number}"), 10.0)
    assert len(told) == QUERIES_PER_S
    questions.ask(b"c99", _ask("q99"), 11.0)
    assert len(told) == QUERIES_PER_S + 1


def test_two_clients_with_one_query_id_both_get_answers(questions: PreviewQueries, told: Told) -> None:
    questions.ask(b"c", _ask("same"), 10.0)
    questions.ask(b"d", _ask("same"), 10.0)
    questions.answer(Previewed("same", {"lr": 1}, 0))
    assert [peer for peer, message in told if isinstance(message, Previewed)] == [b"c", b"d"]
