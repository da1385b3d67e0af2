"""SVG text: escaping, numbers, and the few shapes the charts are made of.

Owns the syntax, so that the charts read as geometry. Output is plain ASCII, without scripts, fonts
or links, and the same for the same input.
"""

import re
from xml.sax.saxutils import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Roboto, Helvetica, Arial, sans-serif"
INK = "#1f2933"
MUTED = "#6b7784"
GRID = "#dfe4e9"
TRACK = "#f1f4f7"
PAPER = "#ffffff"
LIMIT = "#b23b3b"
# Dark text on a coloured box: stays dark where a page is dark, unlike INK.
INK_ON_COLOUR = "#1f2934"

# Characters that XML 1.0 does not allow, not even escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def text_of(words: str) -> str:
    """Escape words for use as content or as an attribute."""
    return plain_ascii(escape(words, {'"': "&quot;"}))


def plain_ascii(markup: str) -> str:
    """Replace what is not ASCII by references, and what XML does not allow by question marks."""
    return _FORBIDDEN.sub("?", markup).encode("ascii", "xmlcharrefreplace").decode("ascii")


def number_of(value: float) -> str:
    """Print a coordinate: two decimals, no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def label(
    x: float,
    y: float,
    words: str,
    *,
    font_px: float = 12,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    """One line of text, with its baseline at `y`."""
    return (
        f'<text x="{number_of(x)}" y="{number_of(y)}" font-size="{number_of(font_px)}" '
        f'fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{text_of(words)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    colour: str,
    opacity: float = 1.0,
    radius: float = 0.0,
    hint: str = "",
) -> str:
    """A filled rectangle; `hint` is what a browser shows when it is pointed at."""
    shape = (
        f'<rect x="{number_of(x)}" y="{number_of(y)}" width="{number_of(width)}" '
        f'height="{number_of(height)}" fill="{colour}"'
    )
    if radius:
        shape += f' rx="{number_of(radius)}"'
    if opacity < 1:
        shape += f' fill-opacity="{number_of(opacity)}"'
    return f"{shape}><title>{text_of(hint)}</title></rect>" if hint else f"{shape}/>"


def line(
    x1: float, y1: float, x2: float, y2: float, *, colour: str, is_dashed: bool = False
) -> str:
    """A thin line."""
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    ends = "".join(
        f'{name}="{number_of(value)}" '
        for name, value in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2))
    )
    return f'<line {ends}stroke="{colour}" stroke-width="1"{dashes}/>'


def document(width: float, height: float, title: str, shapes: list[str]) -> str:
    """A whole SVG file."""
    size = f'width="{number_of(width)}" height="{number_of(height)}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {number_of(width)} {number_of(height)}" role="img" '
        f'font-family="{FONT}"><title>{text_of(title)}</title>'
    )
    background = box(0, 0, width, height, colour=PAPER)
    return "\n".join([head, background, *shapes, "</svg>"]) + "\n"
