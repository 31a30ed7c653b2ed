"""Several operators send many proposals while the hub is killed repeatedly. Checks that no proposal is lost or applied
twice.

python -m tests.faults.storm [--proposals 1000] [--kills 50] [--seed 0]

Hubs are real processes, ranks are real agents and operators are real clients; only the training is omitted.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agents.client import Client
from agents.protocol import Changes, CommandState
from agents.recording.commands import read_commands
from agents.rundir.runs import COMMANDS_FILE
from tests.unit.agents.fleet import Fleet, HubProcess

OUTSTANDING = 6  # proposals of one operator
OPERATORS = 2
TWICE = 0.1  # probability, in each turn of an operator, that it also uses the id of an earlier proposal again
DEADLINE_S = 60.0  # maximum time until the last proposals are settled

ASKS: tuple[tuple[str, float], ...] = (("legal", 0.8), ("illegal", 0.1), ("illegal together", 0.1))


@dataclass
class Outcome:
    """What happened in a run: the proposals that were sent, the state of each at the end, and the changes that the
    ranks applied."""

    asked: dict[str, Changes]
    states: dict[str, CommandState]
    carried_out: list[int]
    values: Changes  # knob values of rank 0 at the end
    kills: int
    seconds: float
    wrong: list[str] = field(default_factory=list)

    def counts(self) -> str:
        states = Counter(state.state for state in self.states.values())
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


class Storm:
    """A run without training: a hub process that is killed repeatedly, agents in place of ranks, and clients that send
    the proposals of several operators."""

    def __init__(self, folder: Path, proposals: int, kills: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._hub = HubProcess(folder).start()
        self._journal = folder / COMMANDS_FILE
        self._fleet = Fleet(self._hub.endpoints.ranks)
        self._clients = [Client(self._hub.endpoints.clients) for _ in range(OPERATORS)]
        self._proposals, self._kills = proposals, kills
        self._asked: dict[str, Changes] = {}
        self._open: list[set[str]] = [set() for _ in self._clients]
        self._final: dict[str, CommandState] = {}

    def run(self) -> Outcome:
        began = time.monotonic()
        # Wait for the board, so that a proposal can be refused only for its value.
        while not self._clients[0].state.board:
            self._turn()
        at = sorted(self._chance.sample(range(self._proposals), self._kills))
        killed = 0
        while len(self._asked) < self._proposals or killed < self._kills:
            self._propose()
            self._turn()
            if killed < self._kills and len(self._asked) > at[killed]:
                time.sleep(self._chance.random() * 0.03)
                self._hub.kill()
                for _ in range(self._chance.randrange(3)):
                    self._turn()  # ranks and operators continue without a hub
                self._hub.start()
                killed += 1
        deadline = time.monotonic() + DEADLINE_S
        while any(self._open) and time.monotonic() < deadline:
            self._turn()
        self._left = {
            id: client.state.commands.get(id)
            for client, still in zip(self._clients, self._open, strict=True)
            for id in still
        }
        outcome = Outcome(
            self._asked,
            self._final,
            self._fleet.carried_out,
            self._fleet.boards[0].values,
            killed,
            time.monotonic() - began,
        )
        self._hub.stop()
        outcome.wrong = [f"{id} is left as {state}" for id, state in self._left.items()]
        outcome.wrong += wrongs(outcome, [entry.state for entry in read_commands(self._journal).commands])  # type: ignore[arg-type]
        return outcome

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._fleet.close()
        self._hub.clean_up()

    def _propose(self) -> None:
        for client, still in zip(self._clients, self._open, strict=True):
            if len(still) < OUTSTANDING and len(self._asked) < self._proposals:
                changes = self._changes()
                still.add(id := client.propose(changes))
                self._asked[id] = changes
            if self._final and self._chance.random() < TWICE:
                id = self._chance.choice(list(self._final))
                client.propose({"micro_batches": 1}, id=id)  # a proposal with a used id has no effect

    def _changes(self) -> Changes:
        legal: Changes = {"micro_batches": self._chance.choice([1, 2, 4, 8])}
        kinds, weights = zip(*ASKS, strict=True)
        kind = self._chance.choices(kinds, weights)[0]
        if kind == "illegal":
            return {"micro_batches": 3}
        if kind == "illegal together":  # only the ranks can detect this
            return {"micro_batches": 3, "recompute": "full"}
        return legal | (
            {"recompute": self._chance.choice(["none", "full"])} if self._chance.random() < 0.5 else {}
        )

    def _turn(self) -> None:
        self._fleet.turn()
        for client, still in zip(self._clients, self._open, strict=True):
            client.poll(0.003)
            for id in list(still):
                state = client.state.commands.get(id)
                if state and state.settled:
                    still.discard(id)
                    self._final[id] = state


def wrongs(outcome: Outcome, journal: list[CommandState]) -> list[str]:
    """What went wrong in the run, such as a change that was lost or applied twice; one sentence for each error."""
    states = outcome.states
    wrong = [f"{id} was never settled" for id in outcome.asked if id not in states]
    applied = sorted((s for s in states.values() if s.state == "applied"), key=lambda s: s.revision)
    revisions = [state.revision for state in applied]
    wrong += [f"{count} changes have revision {r}" for r, count in Counter(revisions).items() if count > 1]
    done = [r for r in outcome.carried_out if r in set(revisions)]
    wrong += [f"revision {r} was applied {n} times" for r, n in Counter(done).items() if n > 1]
    wrong += [f"revision {r} is reported as applied, but was not" for r in set(revisions) - set(done)]
    refused = {s.revision for s in states.values() if s.state == "rejected"} - {0}
    wrong += [
        f"the ranks applied revision {r}, which no client received"
        for r in set(outcome.carried_out) - set(done) - refused
    ]
    if done != sorted(done):
        wrong.append("changes were applied in the wrong order")
    values: Changes = {"micro_batches": 4, "recompute": "none"}
    for state in applied:
        if state.before != {name: values[name] for name in state.changes}:
            wrong.append(f"revision {state.revision}: before is {state.before}, but {values} was in force")
        values |= state.changes
    if values != outcome.values:
        wrong.append(
            f"the ranks have {outcome.values}, but according to the answers they should have {values}"
        )
    for id, changes in outcome.asked.items():
        state = states.get(id)
        if state and state.changes != changes:
            wrong.append(f"{id} proposed {changes}, but the answer has {state.changes}")
        if state and (state.state == "applied") == (3 in changes.values()):
            wrong.append(f"{id}, {changes}, was {state.state}: {state.why}")
    written = {state.id: state for state in journal}
    for id, state in states.items():
        kept = written.get(id)
        if kept is None or (kept.state, kept.revision) != (state.state, state.revision):
            wrong.append(f"the answer to {id} is {state.state}, but the journal has {kept and kept.state}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--proposals", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storm = Storm(Path(folder), options.proposals, options.kills, options.seed)
        try:
            outcome = storm.run()
        finally:
            storm.close()
    print(
        f"{len(outcome.asked)} proposals, the hub killed {outcome.kills} times, {outcome.seconds:.0f} s: "
        f"{outcome.counts()}; {len(outcome.carried_out)} sent to the ranks; {len(outcome.wrong)} wrong"
    )
    print("".join(f"  {one}\n" for one in outcome.wrong), end="")
    raise SystemExit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
