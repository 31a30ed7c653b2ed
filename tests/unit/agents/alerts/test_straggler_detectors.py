"""Detectors of ranks that compute more slowly than ranks with the same amount of work (stragglers), and of slowdowns of
the whole run."""

from msgspec import structs

from agents.alerts.detection import Detection
from agents.alerts.finding import Finding
from agents.alerts.stragglers import Slowdown, Straggler
from agents.protocol import Experts, LayerLoad, Step, Traffic
from agents.protocol.held_experts import held_facts
from agents.state.run_state import RunState
from tests.unit.agents.detector_inputs import WORLD, feed, run_of
from tests.unit.agents.fleet import make_hello, make_step, make_summary


def steps_of(step: int, own_ms: dict[int, float]) -> list[Step]:
    """The records of all ranks for one step. A rank computes for `own_ms[rank]` ms, or for 60 ms if it has no entry,
    and waits in a collective for the rest of the step.
    """
    return [waits(make_step(rank, step), own_ms.get(rank, 60.0)) for rank in range(WORLD)]


def waits(record: Step, own_ms: float) -> Step:
    """A copy of `record` for a step of 200 ms, in which the rank computes for `own_ms` and then waits in a
    collective."""
    return structs.replace(record, step_ms=200.0, comm={"dp": Traffic(0, 200.0 - own_ms, 200.0 - own_ms)})


def watched_steps(
    own_ms: dict[int, float], steps: int = 8, world: int = WORLD, shared: bool = False
) -> list[Finding]:
    state, straggler = run_of(world), Straggler()
    state.apply(structs.replace(make_summary(1), oversubscribed=shared))
    for step in range(steps):
        own = {rank: own and own + step % 3 for rank, own in own_ms.items()}
        feed(state, [record for record in steps_of(step, own) if record.rank < world])
        found = straggler.check(state, float(step))
    return found or []


def test_a_straggler_is_found_among_ranks_with_the_same_work() -> None:
    (found,) = watched_steps({6: 90.0})
    assert found.ranks == (6,) and found.subject == "rank 6"
    assert "+52 %" in found.text and "3 ranks" in found.text


def test_a_stage_with_more_work_is_not_a_straggler() -> None:
    assert watched_steps({4: 90.0, 5: 91.0, 6: 90.0, 7: 92.0}) == []


def test_peers_that_only_wait_are_no_reference() -> None:
    assert watched_steps(dict.fromkeys(range(WORLD), 0.0) | {6: 50.0}) == []


def test_ranks_with_popular_experts_are_not_stragglers() -> None:
    """Ranks 0 to 3 hold the popular expert 0, so they may be slow. Rank 9 is a straggler, because the load of its
    expert is too low to explain its slowness."""
    state, straggler = RunState(), Straggler()
    for rank in range(16):
        facts = held_facts({0: [rank // 4]})
        state.apply(structs.replace(make_hello(rank, 16, coords={"ep": rank // 4}), facts=facts))

    def subjects(own_ms: dict[int, float]) -> list[str]:
        for step in range(5):
            records = [waits(make_step(rank, step), own_ms.get(rank, 60.0)) for rank in range(16)]
            feed(state, records)
            found = straggler.check(state, float(step))
        return [one.subject for one in found or []]

    popular = dict.fromkeys(range(4), 90.0)
    assert subjects(popular) == []
    assert subjects(popular | {9: 90.0}) == ["rank 9"]
    assert subjects(popular | {2: 120.0}) == ["rank 2"]
    assert len(subjects(popular)) == 0, "a slow rank that is fast again is none"


def test_the_load_of_the_experts_explains_the_time_of_a_rank_without_peers() -> None:
    state, straggler = RunState(), Straggler()
    for rank in range(8):
        hello = structs.replace(make_hello(rank, 8, coords={"ep": rank}), facts=held_facts({0: [rank]}))
        state.apply(hello)
    state.apply(Experts(0, [LayerLoad(0, [20, 10, 10, 10, 10, 10, 5, 5], 0)]))
    for step in range(5):
        feed(state, [waits(make_step(rank, step), {0: 90.0, 3: 90.0}.get(rank, 60.0)) for rank in range(8)])
        found = straggler.check(state, float(step))
    assert [one.subject for one in found or []] == ["rank 3"]


def test_one_slow_step_is_not_a_straggler() -> None:
    state, straggler = run_of(), Straggler()
    for step in range(9):
        feed(state, steps_of(step, {6: 95.0} if step == 8 else {}))
        found = straggler.check(state, float(step))
    assert found == []


def test_a_straggler_is_reported_until_well_below_the_limit() -> None:
    state, straggler = run_of(), Straggler()
    said = []
    for step, own in enumerate([90.0] * 6 + [66.0] * 6 + [62.0] * 6 + [66.0] * 6):
        feed(state, steps_of(step, {6: own}))
        said.append(bool(straggler.check(state, float(step))))
    assert said == [False] * 4 + [True] * 10 + [False] * 10


def test_an_alert_says_at_which_step_its_condition_began() -> None:
    state, straggler, slowdown = (
        run_of(),
        Detection([Straggler()], lambda: 0.0),
        Detection([Slowdown()], lambda: 0.0),
    )
    began = {}
    for step in range(20, 60):
        feed(state, steps_of(step, {6: 90.0 if step >= 40 else 60.0}))
        state.apply(structs.replace(make_summary(step), step_ms=300.0 if step >= 45 else 100.0))
        for alert in straggler.check(state, float(step)) + slowdown.check(state, float(step)):
            began[alert.name] = alert.step, alert.since_step
    assert began == {"straggler": (44, 40), "slowdown": (48, 45)}


def test_in_a_stage_of_two_the_slower_rank_is_named() -> None:
    (found,) = watched_steps({2: 90.0}, world=4)
    assert found.ranks == (2,) and "against the other rank with the same work" in found.text
    assert watched_steps({2: 75.0}, world=4) == [], "one value is less certain than a median"


def test_a_rank_without_peers_is_compared_with_its_own_baseline() -> None:
    state, straggler = run_of(2), Straggler()
    said = []
    for step in range(40):
        feed(state, steps_of(step, {1: 90.0 if step >= 25 else 60.0})[:2])
        said.append([one.text for one in straggler.check(state, float(step)) or []])
    assert not any(said[:27]) and said[-1] == [
        "rank 1 (pp1 dp0) has an own time of 90 ms a step, +50 % against its own 60 ms before"
    ]


def test_a_knob_change_resets_the_baseline() -> None:
    state, straggler = run_of(2), Straggler()
    for step in range(40):
        slow = {1: 90.0 if step >= 25 else 60.0}
        feed(state, [structs.replace(one, revision=int(step >= 25)) for one in steps_of(step, slow)[:2]])
        assert not straggler.check(state, float(step))


def test_ranks_on_shared_cores_have_wider_limits() -> None:
    (found,) = watched_steps({6: 90.0}, steps=20, shared=True)
    assert found.ranks == (6,)
    assert watched_steps({6: 90.0}, steps=14, shared=True) == []
    assert watched_steps({6: 75.0}, steps=20, shared=True) == []


def slowed(*step_ms: float, shared: bool = False, revisions: dict[int, int] | None = None) -> list[list[str]]:
    state, slowdown, said = RunState(), Slowdown(), []
    for step, ms in enumerate(step_ms):
        revision = max((to for at, to in (revisions or {}).items() if step >= at), default=0)
        summary = structs.replace(make_summary(step), step_ms=ms, revision=revision, oversubscribed=shared)
        state.apply(summary)
        said.append([one.text for one in slowdown.check(state, 0.0) or []])
    assert slowdown.check(state, 0.0) is None
    return said


def test_a_slowdown_lasts_until_the_run_is_fast_again() -> None:
    said = slowed(*[290.0] * 20, *[820.0] * 50, *[295.0] * 8)
    assert not any(said[:22])
    assert all(said[22:70]) and said[40] == ["the run has slowed down: 820 ms a step, 290 ms before"]
    assert not any(said[-5:])


def test_longer_steps_after_a_knob_change_are_not_a_slowdown() -> None:
    assert not any(slowed(*[290.0] * 20, *[820.0] * 30, revisions={20: 1}))


def test_on_shared_cores_a_slowdown_has_a_wider_limit_and_a_cause() -> None:
    assert not any(slowed(*[290.0] * 20, *[400.0] * 20, shared=True))
    assert "another program" in slowed(*[290.0] * 20, *[820.0] * 20, shared=True)[-1][0]
