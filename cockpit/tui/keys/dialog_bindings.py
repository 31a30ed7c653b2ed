"""Default key bindings of the dialogs: the knob board, the list of runs, the info screen, and the confirmation before a
run ends."""

from cockpit.tui.keys.action import Action, bindings
from cockpit.tui.keys.general_bindings import LIST

INFO = (
    Action("info.copy", "y", "copy", "copy", "Copy the text of this line to the clipboard", 1),
    Action("info.help", "question_mark,f1", "screen.help", "help", "Explain the list and its keys", 4),
    Action("info.close", "escape,i,q", "screen.close", "close", "Close the list", 2),
)

RUNS = (
    Action("runs.open", "enter", "screen.open", "open", "Attach to the run, or play its recording", 1),
    Action("runs.mark", "space", "mark", "mark", "Mark the run for a comparison, or remove the mark", 2),
    Action(
        "runs.compare",
        "c",
        "screen.compare",
        "compare",
        "Compare the run on the screen with the marked ones, or with this one",
        3,
    ),
    Action("runs.help", "question_mark,f1", "screen.help", "help", "Explain the list and its keys", 4),
    Action("runs.close", "escape,R,q", "screen.close", "close", "Close the list", 2),
)

BOARD = (
    Action("board.up", "up,shift+tab", "move(-1)", "knob", "Go to the knob or action above"),
    Action("board.down", "down,tab", "move(1)", "knob", "Go to the knob or action below"),
    Action("board.less", "left", "turn(-1)", "value", "Choose the previous legal value"),
    Action("board.more", "right", "turn(1)", "value", "Choose the next legal value"),
    Action(
        "board.propose",
        "enter",
        "propose",
        "propose",
        "Propose the edits to the run; all are applied, or none",
        3,
        operator=True,
    ),
    Action(
        "board.try",
        "ctrl+t",
        "try",
        "try",
        "Try the edited knob: measure before and after, revert unless clearly faster",
        6,
        operator=True,
    ),
    Action(
        "board.keep",
        "ctrl+k",
        "decide(True)",
        "keep",
        "Keep the value on trial",
        4,
        operator=True,
    ),
    Action(
        "board.end",
        "ctrl+r",
        "decide(False)",
        "end trial",
        "End the trial and revert its value now",
        5,
        operator=True,
    ),
    Action(
        "board.undo",
        "u,ctrl+u",
        "undo",
        "undo",
        "Name the change that undo would revert; press again to revert it",
        7,
        operator=True,
    ),
    Action("board.help", "question_mark,f1", "help", "help", "Explain the board and list its keys", 1),
    Action("board.close", "escape", "close", "close", "Discard the edits; press again to close", 2),
)

ENDING = (
    Action("ending.save", "s", "save", "save, then end", "Save a checkpoint, then end the run", 3),
    Action("ending.end", "y", "end", "end", "End the run now", 2),
    Action("ending.stay", "escape,n", "stay", "continue", "Let the run continue", 1),
)

RUNS_KEYS = bindings((*LIST, *RUNS))

INFO_KEYS = bindings((*LIST, *INFO))

BOARD_KEYS = bindings(BOARD)

ENDING_KEYS = bindings(ENDING)
