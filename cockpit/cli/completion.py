"""``cockpit completion``: prints a shell completion script."""

from argparse import ArgumentParser

from cockpit.printing import print_script
from engine import layouts
from engine.completion import FILES, FOLDERS, Completion, layout_keys, one_of, script
from engine.config.knob_values import COMPRESSION_KNOBS
from engine.config.sections.knobs import Knobs

KNOBS = (*Knobs.__struct_fields__, "grad_clip", "schedule", "zero", *COMPRESSION_KNOBS)
ACTIONS = ("expert_placement", "pause", "profile=", "resume", "save", "stop")
RUNS: Completion = {  # names in the runs folder
    "bash": "_cockpit_runs",
    "zsh": "{compadd -- ${COCKPIT_RUNS:-runs}/*(/N:t)}",
    "fish": "(_cockpit_runs)",
    "preamble": {
        "bash": '_cockpit_runs() { compgen -W "$(ls "${COCKPIT_RUNS:-runs}" 2>/dev/null)" -- "$1"; }',
        "fish": "function _cockpit_runs; command ls (string length -q -- $COCKPIT_RUNS; and echo $COCKPIT_RUNS; "
        "or echo runs) 2>/dev/null; end",
    },
}


def completion(parser: ArgumentParser, shell: str) -> int:
    """Print the completion script of a shell. For the name of a knob, the script offers the
    engine's knobs, but not those of other training loops.
    """
    print_script(
        script(
            parser,
            shell,
            {
                "changes": one_of([*(f"{knob}=" for knob in KNOBS), *ACTIONS]),
                "relayout.changes": one_of([f"{key}=" for key in layout_keys()]),
                "within": one_of([f"{knob}=" for knob in KNOBS]),
                "allow_loss": one_of(KNOBS),
                "words": one_of(layouts.names(), files=True),
                "simulate": one_of(layouts.names(), files=True),
                "scenario": one_of(layouts.names(layouts.SCENARIOS), files=True),
                **dict.fromkeys(("run", "named", "first", "second"), RUNS),
                **dict.fromkeys(("key", "out"), FILES),
                **dict.fromkeys(("dir", "folder"), FOLDERS),
            },
        )
    )
    return 0
