"""HTML text: escaping, tables, notes, lists of facts.

Owns the syntax, so that sections read as content. Everything that comes from a file goes through
`text_of`; output is plain ASCII.
"""

from collections.abc import Iterable, Sequence

from lohan.report.svg import text_of

_LONGEST_CELL = 400


def shortened(words: str, num_letters: int = _LONGEST_CELL) -> str:
    """Cut a text that would burst the page, and say so."""
    if len(words) <= num_letters:
        return words
    return f"{words[:num_letters]}... ({len(words):,} letters)"


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    num_text_columns: int = 1,
    has_row_heads: bool = True,
) -> str:
    """A table; the first columns are texts, the others numbers, which are set to the right."""
    lines = [f"<div class=scroll><table><caption>{text_of(caption)}</caption><thead><tr>"]
    for index, column in enumerate(columns):
        lines.append(f"<th scope=col{_class(index, num_text_columns)}>{text_of(column)}</th>")
    lines.append("</tr></thead><tbody>")
    for row in rows:
        lines.append("<tr>")
        for index, cell in enumerate(row):
            words = text_of(shortened(cell))
            if index == 0 and has_row_heads:
                lines.append(f"<th scope=row>{words}</th>")
            else:
                lines.append(f"<td{_class(index, num_text_columns)}>{words}</td>")
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table></div>"])


def _class(index: int, num_text_columns: int) -> str:
    return "" if index < num_text_columns else " class=number"


def folded(summary: str, content: str) -> str:
    """Content that is shown when asked for; works without a script."""
    return f"<details><summary>{text_of(summary)}</summary>{content}</details>"


def note(words: str) -> str:
    """A remark in small print."""
    return f"<p class=note>{text_of(words)}</p>"


def not_recorded(what: str, file: str) -> str:
    """What stands where something is missing."""
    return f"<p class=missing>{text_of(what)}: not recorded (no usable {text_of(file)}).</p>"


def section(anchor: str, heading: str, *content: str) -> str:
    """One section of the page."""
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-heading">'
        f'<h2 id="{anchor}-heading">{text_of(heading)}</h2>{"".join(content)}</section>'
    )


def grid(*figures: str) -> str:
    """Figures side by side where there is room."""
    shown = [figure for figure in figures if figure]
    return f"<div class=grid>{''.join(shown)}</div>" if shown else ""
