"""Templates filled in: everything that comes from a file is escaped on its way into the page.

Owns how templates are found and filled, and what a table of the page is made of. The templates
themselves, the style and the script are in `report/templates`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_LONGEST_CELL = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first columns are texts, the others numbers, which are set to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1


def shortened(words: str, num_letters: int = _LONGEST_CELL) -> str:
    """Cut a text that would burst the page, and say so."""
    if len(words) <= num_letters:
        return words
    return f"{words[:num_letters]}... ({len(words):,} letters)"


def template_text(name: str) -> str:
    """Return a template, or another file beside them, as it stands."""
    path = resources.files("lohan.report").joinpath("templates", name)
    return path.read_text(encoding="utf-8")


@functools.cache
def _templates() -> "Environment":
    import jinja2  # only where a page is made: it takes longer to import than most commands run

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(template_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters["shortened"] = shortened
    return found


def filled(template: str, **values: object) -> str:
    """Return a template with values in it, as markup that other templates take as it is."""
    return as_markup(_templates().get_template(template).render(values))


def as_markup(text: str) -> str:
    """Mark a text as markup: it is not escaped again."""
    from markupsafe import Markup

    return Markup(text)
