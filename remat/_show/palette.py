"""Colors and order of categories and passes, the same in terminal, page and figure."""

CATEGORY_COLORS = {
    "parameters": "#4477aa",
    "optimizer": "#66ccee",
    "gradients": "#228833",
    "batch": "#aaaa00",
    "argument": "#5588bb",
    "residuals": "#ee6677",
    "temporaries": "#ccbb44",
    "outputs": "#aa3377",
    "constants": "#888888",
    "unknown": "#bbbbbb",
    "gaps": "#666666",
}
"""Paul Tol's bright scheme: told apart also by the color-blind."""

PHASE_COLORS = {
    "forward": "#4477aa",
    "backward": "#ee6677",
    "recompute": "#ccbb44",
    "optimizer": "#66ccee",
    None: "#888888",
}
