"""Default key bindings that are not specific to one screen: those of the app, of all screens, panels and lists, of the
prompt, and of replays."""

from cockpit.tui.keys.action import Action, bindings

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
    Action("app.step_back", "left_square_bracket", "step_by(-1)", "step back", "Select the previous step"),
    Action(
        "app.step_on",
        "right_square_bracket",
        "step_by(1)",
        "step on",
        "Select the next step; after the newest one, follow the run",
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
            ("traffic", "Traffic", "Bytes between each pair of ranks, and the time they take"),
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

PICKER = (
    Action("picker.up", "up,K", "move(-1)", "up", "Go to the metric above"),
    Action("picker.down", "down,j", "move(1)", "down", "Go to the metric below"),
    Action("picker.choose", "enter", "choose", "choose", "Show this metric", 1),
    Action("picker.close", "escape,p,q", "close", "close", "Close the list", 2),
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
    Action(
        "list.find", "f", "find", "find", "List only the lines that contain a text; esc lists all again", 6
    ),
    Action("list.wrap", "w", "wrap", "wrap", "Wrap long lines, or cut them", 9),
)
"""Keys of every list: the log, the console output, the runs."""

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
    Action("prompt.earlier", "up", "recall(-1)", "earlier", "Show the previous text that was entered"),
    Action("prompt.later", "down", "recall(1)", "later", "Show the next text that was entered"),
    Action(
        "prompt.leave",
        "escape",
        "leave",
        "leave",
        "Leave the prompt; at the filter prompt, this removes the filter",
    ),
)

APP_KEYS = bindings((*SCREENS, *APP))

PANELS_KEYS = bindings(PANELS)

PICKER_KEYS = bindings(PICKER)

PROMPT_KEYS = bindings(PROMPT)

# A recording has no knobs to change, and has its own keys for pausing and stepping.
NOT_IN_REPLAY = {"app.knobs", "app.undo", "app.freeze", "app.step_back", "app.step_on"}
