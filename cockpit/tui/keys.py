"""Key bindings as data: a stable id, the keys, the action and one sentence of help.

A user remaps a key by id in ``keys.toml`` of the configuration directory, e.g. ``"app.knobs" = "b"``.
No action has only ctrl+a or ctrl+b (prefix keys of screen and tmux) or an Alt key.
"""

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """One key binding. `footer` is its priority in the footer: 1 is the highest, and an action with 0 is never shown
    there."""

    id: str
    keys: str
    action: str
    label: str
    about: str
    footer: int = 0
    priority: bool = False
    operator: bool = False  # the action changes the run, so the footer hides it from viewers


APP = (
    Action("app.knobs", "k", "knobs", "knobs", "Open the knob board to see and change knobs", 3),
    Action(
        "app.undo",
        "u",
        "undo",
        "undo",
        "Open the knob board and name the change that undo would revert",
        operator=True,
    ),
    Action(
        "app.filter",
        "slash",
        "filter",
        "filter",
        "Show only ranks that match, such as pp=1 & own_ms > 1.2 * median",
        6,
        priority=True,
    ),
    Action(
        "app.anomaly",
        "n",
        "anomaly(1)",
        "next anomaly",
        "Select the next anomaly and show it: alerts, outliers, experts, the slowest step",
        4,
    ),
    Action("app.anomaly_back", "N", "anomaly(-1)", "previous anomaly", "Show the previous anomaly"),
    Action("app.step_back", "left_square_bracket", "step_by(-1)", "step back", "Look at the step before"),
    Action(
        "app.step_on",
        "right_square_bracket",
        "step_by(1)",
        "step on",
        "Look at the next step; after the newest one, follow the run",
    ),
    Action(
        "app.jump",
        "colon",
        "jump",
        "go to",
        "Go to a step, rank 17, expert 3.12, a mark, a screen, or last",
        priority=True,
    ),
    Action(
        "app.mark",
        "apostrophe",
        "mark",
        "mark",
        "Set a mark with a note at the step that is shown",
        priority=True,
    ),
    Action("app.freeze", "space", "freeze", "freeze", "Freeze all screens; press again to continue", 5),
    Action(
        "app.screenshot",
        "s",
        "take_screenshot",
        "screenshot",
        "Take a screenshot: an SVG file in the current folder",
    ),
    Action("app.theme", "t", "theme", "theme", "Switch to the next theme"),
    Action("app.help", "question_mark,f1", "help", "help", "Explain the focused panel and list all keys", 2),
    Action("app.runs", "R", "runs", "runs", "List the runs: open another one, or compare runs"),
    Action("app.info", "i", "info", "info", "Show the settings of the run, and where its files are"),
    Action("app.palette", "ctrl+p", "command_palette", "palette", "Find an action by name"),
    Action(
        "app.suspend",
        "ctrl+z",
        "suspend_process",
        "suspend",
        "Suspend the cockpit; `fg` in the shell resumes it",
        priority=True,
    ),
    Action(
        "app.quit",
        "q,ctrl+c",
        "quit",
        "quit",
        "Quit the cockpit; it asks for confirmation if that ends the run",
        1,
    ),
)

SCREENS = tuple(
    Action(f"screen.{name}", str(number), f"screen('{name}')", label, about)
    for number, (name, label, about) in enumerate(
        (
            ("overview", "Overview", "The whole run at a glance"),
            ("ranks", "Ranks", "Each rank: any metric, its history and its phases"),
            ("pipeline", "Pipeline", "The timeline of a step, and its bubble"),
            ("experts", "Experts", "Load of each expert of each layer"),
            ("traffic", "Traffic", "Who sends how much to whom, and what it costs"),
            ("curves", "Curves", "Any metric over the steps of the run"),
            ("plan", "Plan", "Memory, what-if and advice of the planner"),
            ("log", "Log", "Events, alerts and changes of the run"),
        ),
        start=1,
    )
)
"""The screens by key; the id of a screen is ``screen.NAME``."""

PANELS = (
    Action("panel.next", "tab", "turn(1)", "panel", "Go to the next panel", 4, priority=True),
    Action(
        "panel.previous", "shift+tab", "turn(-1)", "previous panel", "Go to the previous panel", priority=True
    ),
    Action(
        "panel.zoom",
        "z",
        "zoom",
        "zoom",
        "Show the focused panel on the whole screen; press again for all panels",
        6,
    ),
    Action("panel.open", "enter", "open", "open", "Open the screen with the details of this panel", 5),
    Action(
        "panel.back", "escape", "back", "back", "Leave the maximised panel, or return to the previous screen"
    ),
)

RANKS = (
    Action("ranks.metric", "m", "metric(1)", "metric", "Show the next metric", 7),
    Action("ranks.metric_back", "M", "metric(-1)", "previous metric", "Show the previous metric"),
    Action("ranks.pick", "p", "pick", "pick", "List all metrics, each with its median and its worst rank", 8),
    Action("ranks.worst", "w", "worst", "worst", "Go to the worst rank; press again for the next worst", 5),
    Action("ranks.group", "g", "regroup", "group", "Group the ranks by the next axis, or by node", 8),
    Action(
        "ranks.compare",
        "c",
        "compare",
        "compare",
        "Colour by deviation from the peers, by deviation from the rank's own earlier steps, or by value",
        9,
    ),
)
"""Keys of all panels about ranks."""

# `k` opens the knob board on every screen, so capital K moves up.
GRID = (
    *RANKS,
    Action("ranks.left", "left,h", "cursor(-1,0)", "left", "Move the cursor left"),
    Action("ranks.down", "down,j", "cursor(0,1)", "down", "Move the cursor down"),
    Action("ranks.up", "up,K", "cursor(0,-1)", "up", "Move the cursor up"),
    Action("ranks.right", "right,l", "cursor(1,0)", "right", "Move the cursor right"),
)

RANK_STEPS = (
    *RANKS,
    Action("ranks.earlier", "left,h", "step(-1)", "earlier", "Go to an earlier step"),
    Action("ranks.later", "right,l", "step(1)", "later", "Go to a later step; the newest follows the run"),
    Action("ranks.row_up", "up,K", "row(-1)", "row up", "Go to the worst rank of the row above"),
    Action("ranks.row_down", "down,j", "row(1)", "row down", "Go to the worst rank of the row below"),
    Action("ranks.rows", "o", "rows", "rows", "Show all ranks, the stage of the rank, or its node", 8),
    Action(
        "ranks.fold", "f", "fold", "fold", "Show the newest steps one by one, or all kept steps folded", 8
    ),
)

RANK = (
    *RANKS,
    Action("rank.up", "up,K", "scroll(-1)", "up", "Scroll up"),
    Action("rank.down", "down,j", "scroll(1)", "down", "Scroll down"),
    Action("rank.previous", "left,h", "other(-1)", "previous rank", "Show the previous rank"),
    Action("rank.next", "right,l", "other(1)", "next rank", "Show the next rank"),
)

PICKER = (
    Action("picker.up", "up,K", "move(-1)", "up", "Go to the metric above"),
    Action("picker.down", "down,j", "move(1)", "down", "Go to the metric below"),
    Action("picker.choose", "enter", "choose", "choose", "Show this metric", 1),
    Action("picker.close", "escape,p,q", "close", "close", "Close the list", 2),
)

EXPERTS = (
    Action("experts.worst", "w", "worst", "worst", "Go to the worst expert; press again for the next", 4),
    Action("experts.metric", "m", "metric(1)", "metric", "Show the next metric", 7),
    Action("experts.metric_back", "M", "metric(-1)", "previous metric", "Show the previous metric"),
    Action("experts.order", "o", "order", "order", "Sort each layer by load, or by number", 8),
    Action("experts.left", "left,h", "cursor(-1,0)", "left", "Move the cursor left"),
    Action("experts.down", "down,j", "cursor(0,1)", "down", "Move the cursor down"),
    Action("experts.up", "up,K", "cursor(0,-1)", "up", "Move the cursor up"),
    Action("experts.right", "right,l", "cursor(1,0)", "right", "Move the cursor right"),
)

TRAFFIC = (
    Action("traffic.view", "v", "view", "ranks/nodes", "Switch between rank to rank and node to node", 7),
    Action("traffic.hottest", "x", "hottest", "hottest", "Go to the pair with most bytes", 8),
    Action(
        "traffic.into",
        "enter",
        "into",
        "closer",
        "Show the ranks of this cell, or fewer ranks with numbers",
        5,
    ),
    Action("traffic.out", "escape", "out", "wider", "Show all ranks or nodes again"),
    Action("traffic.left", "left,h", "cursor(0,-1)", "left", "Choose the destination to the left"),
    Action("traffic.down", "down,j", "cursor(1,0)", "down", "Choose the source below"),
    Action("traffic.up", "up,K", "cursor(-1,0)", "up", "Choose the source above"),
    Action("traffic.right", "right,l", "cursor(0,1)", "right", "Choose the destination to the right"),
)

CURVES = (
    Action(
        "curves.in",
        "up,K",
        "scale(0.5)",
        "zoom in",
        "Show half as many steps, at the finest known resolution",
    ),
    Action("curves.out", "down,j", "scale(2)", "zoom out", "Show twice as many steps"),
    Action("curves.back", "left,h", "pan(-0.25)", "earlier", "Show earlier steps"),
    Action("curves.on", "right,l", "pan(0.25)", "later", "Show later steps"),
    Action("curves.all", "0", "all", "all steps", "Show the whole run"),
)

LIST = (
    Action("list.down", "down,j", "move(1)", "down", "Go to the next line; at the newest, follow it"),
    # `k` opens the knob board on every screen, so capital K moves up.
    Action("list.up", "up,K", "move(-1)", "up", "Go to the line above"),
    Action("list.page_down", "pagedown", "page(1)", "page down", "Go down by a page"),
    Action("list.page_up", "pageup", "page(-1)", "page up", "Go up by a page"),
    Action("list.newest", "G,ctrl+end", "newest", "newest", "Go to the newest line and follow it", 8),
    Action("list.oldest", "ctrl+home", "oldest", "oldest", "Go to the oldest line"),
    Action("list.left", "left,h", "pan(-1)", "left", "Show the text further to the left"),
    Action("list.right", "right,l", "pan(1)", "right", "Show the text further to the right"),
    Action("list.find", "f", "find", "find", "List only the lines with a text; esc lists all again", 6),
    Action("list.wrap", "w", "wrap", "wrap", "Wrap long lines, or cut them", 9),
)
"""Keys of every list: the log, the console output, the runs."""

LOG = (
    Action("log.jump", "enter", "jump", "go to step", "Open the screen that shows the entry, at its step", 5),
    Action("log.kind", "v", "kind(1)", "kind", "Show the next kind: changes, alerts, checkpoints, others", 6),
    Action("log.kind_back", "V", "kind(-1)", "previous kind", "Show the previous kind"),
    Action("log.level", "e", "level", "level", "Show all entries, warnings and errors, or only errors", 7),
)

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
        "Compare the run on the screen with the marked ones",
        3,
    ),
    Action("runs.help", "question_mark,f1", "screen.help", "help", "Explain the list and its keys", 4),
    Action("runs.close", "escape,R,q", "screen.close", "close", "Close the list", 2),
)

CONSOLE = (Action("console.file", "o", "file", "output", "Show the next file: engine, hub, failure", 7),)
TIMELINE = (
    Action("timeline.left", "left,h", "move(-1)", "earlier", "Move the cursor to the block before"),
    Action("timeline.right", "right,l", "move(1)", "later", "Move the cursor to the next block"),
    Action("timeline.up", "up,K", "row(-1)", "up", "Move the cursor to the row above"),
    Action("timeline.down", "down,j", "row(1)", "down", "Move the cursor to the row below"),
    Action(
        "timeline.in", "plus,equals_sign", "zoom(0.5)", "zoom in", "Show half the time around the cursor", 7
    ),
    Action("timeline.out", "minus", "zoom(2)", "zoom out", "Show twice the time"),
    Action("timeline.whole", "0", "whole", "whole step", "Show the whole step", 8),
    Action("timeline.pan_left", "H", "pan(-0.5)", "pan left", "Show earlier times of a zoomed step"),
    Action("timeline.pan_right", "L", "pan(0.5)", "pan right", "Show later times of a zoomed step"),
    Action(
        "timeline.replica", "d", "replica", "replica", "Show the next replica; the first is the slowest", 9
    ),
    Action("timeline.rows", "v", "rows", "rows", "A row for each stage, or for each rank of the pipeline", 9),
)

STEPS = (
    Action(
        "steps.slowest", "w", "screen.slowest", "slowest step", "Go to the slowest kept step, and back", 3
    ),
    Action("steps.back", "comma", "screen.kept(-1)", "step back", "Go to the kept step before", 4),
    Action(
        "steps.on", "full_stop", "screen.kept(1)", "step on", "Go to the next kept step, or the newest", 4
    ),
)
"""Keys of the pipeline screen; in a replay they replace the playback keys of the same name."""

CHARTS = (
    Action("charts.metrics", "m", "screen.metrics", "metrics", "Choose the metrics to show", 3),
    Action("charts.marks", "e", "screen.marks", "marks", "List the marks: changes, alerts, checkpoints", 3),
    Action(
        "charts.versus", "v", "screen.versus", "versus", "Compare with another run; again to remove it", 3
    ),
    Action("charts.log", "y", "log", "log scale", "Logarithmic or linear scale of the current chart", 6),
    Action("charts.smooth", "w", "smooth", "average", "Average: none, weak, medium, strong", 6),
    Action(
        "charts.range",
        "r",
        "range",
        "range",
        "Range of the y axis: auto, robust (without the outer 1 %), full",
        7,
    ),
    Action("charts.add", "a", "add", "add", "Show one more metric", 8),
    Action("charts.remove", "x", "remove", "remove", "Remove the current chart", 8),
    Action("charts.align", "b", "align", "align by", "Align compared runs by step, tokens or time", 9),
    Action("charts.left", "left,h", "cursor(-1)", "cursor", "Move the cursor to the left", 7),
    Action(
        "charts.right", "right,l", "cursor(1)", "cursor", "Move the cursor to the right; past the end: newest"
    ),
    Action(
        "charts.far_left", "shift+left", "cursor(-10)", "cursor", "Move the cursor ten columns to the left"
    ),
    Action(
        "charts.far_right", "shift+right", "cursor(10)", "cursor", "Move the cursor ten columns to the right"
    ),
    Action("charts.in", "up,K", "scale(0.5)", "zoom in", "Show half as many steps, around the cursor", 5),
    Action("charts.out", "down,j", "scale(2)", "zoom out", "Show twice as many steps", 9),
    Action("charts.back", "H", "pan(-0.25)", "earlier", "Show earlier steps"),
    Action("charts.on", "L", "pan(0.25)", "later", "Show later steps"),
    Action("charts.all", "0", "all", "all steps", "Show the whole run", 8),
)

MARKS = (
    Action("marks.up", "up,K", "move(-1)", "up", "Go to the mark above"),
    Action("marks.down", "down,j", "move(1)", "down", "Go to the mark below"),
    Action("marks.jump", "enter", "jump", "jump", "Put the cursor of all charts on this mark", 1),
)

PLAN = (
    Action("plan.less", "left,h", "turn(-1)", "value", "Choose the previous legal value", 4),
    Action("plan.more", "right,l", "turn(1)", "value", "Choose the next legal value", 3),
    Action("plan.up", "up,K", "move(-1)", "up", "Go to the setting above"),
    Action("plan.down", "down,j", "move(1)", "down", "Go to the setting below"),
    Action(
        "plan.view", "v", "screen.view", "advice/roofline", "Show advice, roofline, strong or weak scaling", 5
    ),
    Action("plan.reset", "x", "reset", "reset", "Forget all hypothetical values", 7),
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

REPLAY = (
    Action(
        "replay.pause",
        "space",
        "pause",
        "play/pause",
        "Play or pause; at the end, play from the beginning",
        3,
    ),
    Action(
        "replay.back",
        "left_square_bracket,comma",
        "step(-1)",
        "step back",
        "Go back one training step and pause",
        7,
    ),
    Action(
        "replay.on",
        "right_square_bracket,full_stop",
        "step(1)",
        "step forward",
        "Go forward one training step and pause",
        8,
    ),
    Action("replay.slower", "less_than_sign,minus", "faster(-1)", "slower", "Halve the speed", 9),
    Action(
        "replay.faster", "greater_than_sign,plus,equals_sign", "faster(1)", "faster", "Double the speed", 9
    ),
    Action(
        "replay.rewind", "left_curly_bracket", "move(-1)", "rewind", "Go back a twentieth of the recording"
    ),
    Action(
        "replay.forward",
        "right_curly_bracket",
        "move(1)",
        "forward",
        "Go forward a twentieth of the recording",
    ),
    Action("replay.begin", "home", "ends(-1)", "beginning", "Go to the beginning"),
    Action("replay.end", "end", "ends(1)", "end", "Go to the current end of the recording"),
)


PROMPT = (
    Action(
        "prompt.complete",
        "tab",
        "complete",
        "complete",
        "Insert the first word that may come next",
        priority=True,
    ),
    Action("prompt.earlier", "up", "recall(-1)", "earlier", "Show the text that was entered before"),
    Action("prompt.later", "down", "recall(1)", "later", "Show the text that was entered after"),
    Action(
        "prompt.leave", "escape", "leave", "leave", "Leave the prompt; the prompt of the filter removes it"
    ),
)


def bindings(actions: tuple[Action, ...]) -> list[Binding]:
    return [
        Binding(
            action.keys,
            action.action,
            action.label,
            show=action.footer > 0,
            tooltip=action.about,
            id=action.id,
            priority=action.priority,
        )
        for action in actions
    ]


APP_KEYS = bindings((*SCREENS, *APP))
PANELS_KEYS = bindings(PANELS)
RANK_KEYS = bindings(RANK)
GRID_KEYS = bindings(GRID)
RANK_STEPS_KEYS = bindings(RANK_STEPS)
PICKER_KEYS = bindings(PICKER)
EXPERTS_KEYS = bindings(EXPERTS)
TRAFFIC_KEYS = bindings(TRAFFIC)
CURVES_KEYS = bindings(CURVES)
LOG_KEYS = bindings((*LIST, *LOG))
CONSOLE_KEYS = bindings((*LIST, *CONSOLE))
CHARTS_KEYS = bindings(CHARTS)
MARKS_KEYS = bindings(MARKS)
RUNS_KEYS = bindings((*LIST, *RUNS))
TIMELINE_KEYS = bindings(TIMELINE)
STEPS_KEYS = bindings(STEPS)
PLAN_KEYS = bindings(PLAN)
PLAN_VIEW_KEYS = bindings(tuple(action for action in PLAN if action.id == "plan.view"))
INFO_KEYS = bindings((*LIST, *INFO))
BOARD_KEYS = bindings(BOARD)
ENDING_KEYS = bindings(ENDING)
PROMPT_KEYS = bindings(PROMPT)

# A recording has no knobs to change; it has keys of its own for pausing and for steps.
NOT_IN_REPLAY = {"app.knobs", "app.undo", "app.freeze", "app.step_back", "app.step_on"}

ALL = (
    *SCREENS,
    *APP,
    *PANELS,
    *GRID,
    *RANK_STEPS[len(RANKS) :],
    *RANK[len(RANKS) :],
    *PICKER,
    *EXPERTS,
    *TIMELINE,
    *STEPS,
    *TRAFFIC,
    *CURVES,
    *CHARTS,
    *MARKS,
    *LIST,
    *LOG,
    *CONSOLE,
    *RUNS,
    *PLAN,
    *INFO,
    *BOARD,
    *ENDING,
    *REPLAY,
    *PROMPT,
)
BY_ID = {action.id: action for action in ALL}

_NAMES = {
    "question_mark": "?",
    "escape": "esc",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "comma": ",",
    "full_stop": ".",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "minus": "-",
    "plus": "+",
    "equals_sign": "=",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "slash": "/",
    "colon": ":",
    "apostrophe": "'",
}


def spelled(keys: str) -> str:
    """Keys as shown on the screen: ``← h`` for ``left,h``."""
    return " ".join(_NAMES.get(key, key) for key in keys.split(","))
