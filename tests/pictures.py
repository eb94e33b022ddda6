"""What must hold of every picture, found by drawing it: no text on other text, off the figure or across a frame, no place empty."""

from contextlib import contextmanager
from itertools import combinations

import numpy as np

SLACK = 1.0  # pixels


@contextmanager
def _recorded_texts():
    """The texts that are drawn, with their extents in pixels."""
    from matplotlib.text import Text

    found, draw = [], Text.draw

    def recorded(text, renderer, *rest, **options):
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent(renderer)))
        return draw(text, renderer, *rest, **options)

    Text.draw = recorded
    try:
        yield found
    finally:
        Text.draw = draw


def faults_of(figure):
    """What is wrong with a picture, in words."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # which lays it out
    with _recorded_texts() as texts:
        canvas.draw()
    assert texts, "a picture has text"
    texts = list({id(text): (text, box) for text, box in texts}.values())
    faults = [f"{text.get_text()!r} leaves the figure" for text, box in texts if not _inside(box, figure.bbox)]
    for (one, first), (other, second) in combinations(texts, 2):
        if _overlap(first, second):
            faults.append(f"{one.get_text()!r} overlaps {other.get_text()!r}")
    for axes in figure.axes:
        frame = axes.get_window_extent()
        for text, box in texts:
            crossing = _overlap(box, frame)
            if crossing and not (text in axes.texts and _inside(box, frame)):
                faults.append(f"{text.get_text()!r} lies on a frame or on what is drawn in it")
        legend = axes.get_legend()
        if legend is not None and any(_overlap(legend.get_window_extent(), each.get_window_extent()) for each in figure.axes):
            faults.append("a legend lies over axes")
        if not (axes.lines or axes.patches or axes.collections):
            faults.append("axes are empty")
        faults += _cut(axes)
    faults += [
        "a legend lies over axes"
        for legend in figure.legends
        if any(_overlap(legend.get_window_extent(), axes.get_window_extent()) for axes in figure.axes)
    ]
    return faults


def _cut(axes):
    """Data beyond the frame, and units that ticks have and labels repeat."""
    for line in axes.lines:
        if len(line.get_xdata()) == 2 and line.get_linestyle() == ":":
            continue  # a level, from side to side
        points = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
        points = points[np.isfinite(points).all(axis=1)]
        for values, limits, scale in (
            (points[:, 0], axes.get_xlim(), axes.get_xscale()),
            (points[:, 1], axes.get_ylim(), axes.get_yscale()),
        ):
            shown = values[values > 0] if scale == "log" else values
            if len(shown) and not (min(limits) <= shown.min() and shown.max() <= max(limits)):
                yield f"a line of {axes.get_title()!r} is cut"
    for axis in (axes.xaxis, axes.yaxis):
        if len(axis.get_majorticklocs()) < 2 and len(axes.get_yticks()) != 1 and not axes.patches:
            yield f"an axis of {axes.get_title()!r} has no two ticks"


def _inside(box, frame):
    return box.x0 >= frame.x0 - SLACK and box.x1 <= frame.x1 + SLACK and box.y0 >= frame.y0 - SLACK and box.y1 <= frame.y1 + SLACK


def _overlap(one, other):
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width > SLACK and height > SLACK


def check_picture(figure):
    """Raise AssertionError unless a picture needs no excuse."""
    faults = faults_of(figure)
    assert not faults, "\n".join(faults)
