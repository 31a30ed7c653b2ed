"""``cockpit stacks``: prints the stacks of the ranks, grouped by code location, and names the ranks that differ from
the others or did not answer."""

from collections.abc import Sequence
from typing import Any

from agents.protocol import RankStacks, StacksCollected, ThreadStack
from agents.state.stack_groups import Explanation, StackGroup, explanation, ranks_text
from agents.waiting import RunOverError, wait_for_stacks
from cockpit.cli.exit_status import DONE, FAILED, REFUSED
from cockpit.data import format, plain
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.printing import complain, print_json, print_line, print_table, run_mark

ANSWER_S = 12.0  # the hub waits 5 s for its ranks, and starts at most one collection in 3 s


def stacks(run: str | None, ranks: Sequence[int], threads: bool, as_json: bool) -> int:
    """Collect and print the stacks of `ranks`, or of all ranks."""
    with Connection(run, operator=True) as connection:
        _wait_for_ranks(connection)
        world = connection.store.state.world
        beyond = [rank for rank in ranks if rank >= world]
        if beyond:
            raise CockpitError(f"--ranks: this run has no {ranks_text(beyond)}; legal: 0 to {world - 1}")
        try:
            client = connection.client
            answers, end = wait_for_stacks(client, client.collect_stacks(ranks, threads), ANSWER_S)
        except PermissionError as error:
            complain(f"{error}{run_mark(connection.store)}")
            return REFUSED
        except (TimeoutError, RunOverError) as error:
            complain(f"{error}{run_mark(connection.store)}")
            return FAILED
    found = explanation(answers, end)
    if as_json:
        print_json(plain.answer(record(found, answers, end), connection.store))
    else:
        _print(found, answers, threads, run_mark(connection.store))
    return FAILED if end.unanswered or end.not_asked else DONE


def _wait_for_ranks(connection: Connection) -> None:
    """Wait for a snapshot of the run that contains ranks and knobs. After the timeout, a snapshot with ranks but
    without knobs is enough."""
    try:
        connection.wait_for_snapshot()
    except CockpitError:
        if not connection.store.state.hellos:
            raise


def _print(found: Explanation, answers: Sequence[RankStacks], threads: bool, mark: str) -> None:
    print_line(f"{found.sentence}{mark}")
    for group in found.groups:
        print_line("")
        print_line(_title(group))
        _print_thread(group.shown.threads[0])
    if threads:
        for one in sorted(answers, key=lambda one: one.rank):
            for thread in one.threads[1:]:
                print_line("")
                print_line(f"rank {one.rank}, thread {thread.name}")
                _print_thread(thread)
            if one.omitted_threads:
                print_line(
                    f"rank {one.rank}: {one.omitted_threads} more thread{'s' * (one.omitted_threads != 1)}"
                )


def _title(group: StackGroup) -> str:
    shown = group.shown
    before, operation = format.operation_text(shown.doing)
    what = f"{before}{operation} for {format.age(shown.since_ms / 1000)}"
    of = f" (rank {shown.rank})" if len(group.ranks) > 1 else ""
    recorder = f" · {shown.collective}" if shown.collective else ""
    return f"{ranks_text(group.ranks)} · step {shown.step} · {what}{of}{recorder}"


def _print_thread(thread: ThreadStack) -> None:
    rows = [
        [f"  {one.file}:{one.line}", format.clean(one.function), format.clean(one.code) or format.MISSING]
        for one in thread.frames
    ]
    if thread.omitted:
        rows.insert(thread.gap, [f"  … {thread.omitted} frames", "", ""])
    if rows:
        print_table([[format.clean(cell) for cell in row] for row in rows])
    else:
        print_line("  no Python frames")


def record(found: Explanation, answers: Sequence[RankStacks], end: StacksCollected) -> dict[str, Any]:
    """The collected stacks as JSON: one sentence that explains them, the ranks grouped by code location, and the stacks
    of each rank."""
    return {
        "sentence": found.sentence,
        "world": end.world,
        "odd": list(found.odd),
        "groups": [
            {"ranks": list(group.ranks), "place": group.place, "waits": group.waits} for group in found.groups
        ],
        "ranks": [plain.plain(one) for one in answers],
        "unanswered": [{"rank": one.rank, "why": one.why} for one in end.unanswered],
        "more_unanswered": end.more_unanswered,
        "not_asked": end.not_asked,
    }
