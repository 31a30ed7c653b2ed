"""Default key bindings of the panels, by screen."""

from cockpit.tui.keys.action import Action, bindings
from cockpit.tui.keys.general_bindings import LIST

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
    Action("traffic.hottest", "x", "hottest", "hottest", "Go to the pair with the most bytes", 8),
    Action(
        "traffic.into",
        "enter",
        "into",
        "zoom in",
        "Show the ranks of this cell, or fewer ranks with numbers",
        5,
    ),
    Action("traffic.out", "escape", "out", "zoom out", "Show all ranks or nodes again"),
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

LOG = (
    Action("log.jump", "enter", "jump", "go to step", "Open the screen that shows the entry, at its step", 5),
    Action(
        "log.kind",
        "v",
        "kind(1)",
        "kind",
        "Show the next kind: changes, alerts, checkpoints, samples, others",
        6,
    ),
    Action("log.kind_back", "V", "kind(-1)", "previous kind", "Show the previous kind"),
    Action("log.level", "e", "level", "level", "Show all entries, warnings and errors, or only errors", 7),
)

CONSOLE = (Action("console.file", "o", "file", "output", "Show the next file: engine, hub, failure", 7),)

TIMELINE = (
    Action("timeline.left", "left,h", "move(-1)", "earlier", "Move the cursor to the previous block"),
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
    Action(
        "timeline.rows", "v", "rows", "rows", "Show a row for each stage, or for each rank of the pipeline", 9
    ),
)

STEPS = (
    Action(
        "steps.slowest", "w", "screen.slowest", "slowest step", "Go to the slowest kept step, and back", 3
    ),
    Action("steps.back", "comma", "screen.kept(-1)", "step back", "Go to the previous kept step", 4),
    Action(
        "steps.on", "full_stop", "screen.kept(1)", "step on", "Go to the next kept step, or the newest", 4
    ),
)
"""Keys of the pipeline screen; in a replay they replace the playback keys of the same name."""

CHARTS = (
    Action("charts.metrics", "m", "screen.metrics", "metrics", "Choose the metrics to show", 3),
    Action("charts.marks", "e", "screen.marks", "marks", "List the marks: changes, alerts, checkpoints", 3),
    Action(
        "charts.versus",
        "v",
        "screen.versus",
        "versus",
        "Compare with another run; choose it again to remove it",
        3,
    ),
    Action(
        "charts.log", "y", "log", "log scale", "Use a logarithmic or a linear scale for the current chart", 6
    ),
    Action(
        "charts.smooth",
        "w",
        "smooth",
        "average",
        "Choose the moving average: none, weak, medium or strong",
        6,
    ),
    Action(
        "charts.range",
        "r",
        "range",
        "range",
        "Choose the range of the y axis: auto, robust (without the outer 1 %) or full",
        7,
    ),
    Action("charts.add", "a", "add", "add", "Show one more metric", 8),
    Action("charts.remove", "x", "remove", "remove", "Remove the current chart", 8),
    Action("charts.align", "b", "align", "align by", "Align compared runs by step, tokens or time", 9),
    Action("charts.left", "left,h", "cursor(-1)", "cursor", "Move the cursor to the left", 7),
    Action(
        "charts.right",
        "right,l",
        "cursor(1)",
        "cursor",
        "Move the cursor to the right; past the end, follow the newest step",
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

RANK_KEYS = bindings(RANK)

GRID_KEYS = bindings(GRID)

RANK_STEPS_KEYS = bindings(RANK_STEPS)

EXPERTS_KEYS = bindings(EXPERTS)

TRAFFIC_KEYS = bindings(TRAFFIC)

CURVES_KEYS = bindings(CURVES)

LOG_KEYS = bindings((*LIST, *LOG))

CONSOLE_KEYS = bindings((*LIST, *CONSOLE))

CHARTS_KEYS = bindings(CHARTS)

MARKS_KEYS = bindings(MARKS)

TIMELINE_KEYS = bindings(TIMELINE)

STEPS_KEYS = bindings(STEPS)

PLAN_KEYS = bindings(PLAN)

PLAN_VIEW_KEYS = bindings(tuple(action for action in PLAN if action.id == "plan.view"))
