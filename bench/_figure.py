"""Pictures drawn by matplotlib, as SVG text: the same figures give the same text.

text = svg_of("title", (10, 6), draw)        # draw(figure) adds axes and curves
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg_of(title: str, inches: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """SVG of a figure of `inches` (width, height), which `draw` fills. Needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure  # without pyplot: no state of the process, no display

    with mpl.rc_context({"svg.hashsalt": "chameleon_mm", "svg.fonttype": "none"}):  # the same figures, the same file
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.suptitle(title, fontsize=11)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
