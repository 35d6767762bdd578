"""A report: one HTML file that needs nothing from elsewhere, made of tables, charts and pictures.

Everything given is plain text and is escaped; charts come from `sigcam.drawing.charts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from sigcam.core.errors import DataError
from sigcam.drawing.overlay import ends, gradient

PAGES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Number:
    """A cell of a table.

    Args:
        low, high: the ends of its interval.
        difference: from the row that others are compared with, and the ends of its interval.
        better: whether the difference is for the better, beyond doubt; None if neither.
        note: what else is said of it.
    """

    value: float
    low: float | None = None
    high: float | None = None
    difference: tuple[float, float, float] | None = None
    better: bool | None = None
    note: str = ""
    digits: int = 2

    @property
    def text(self) -> str:
        return f"{self.value:.{self.digits}f}"


@dataclass(frozen=True)
class ReportTable:
    """Rows of numbers or words under a header, whose first column names the rows."""

    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Number | str | None]]]
    title: str = ""
    foot: str = ""
    template: ClassVar[str] = "table.html"


@dataclass(frozen=True)
class Charts:
    """Charts side by side, as `line_chart` makes them."""

    figures: Sequence[str]
    title: str = ""
    foot: str = ""
    template: ClassVar[str] = "charts.html"


@dataclass(frozen=True)
class Shot:
    """A picture: its data URI, what it shows for those who cannot see it, and what is written below."""

    source: str
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A wide picture by itself."""

    shot: Shot
    title: str = ""
    template: ClassVar[str] = "figure.html"


@dataclass(frozen=True)
class Card:
    """What is told of one image.

    Args:
        group: what it is filtered by.
        keys: what it is sorted by; None where a number is missing.
        scores: name, probability and evidence (or None) of its likely classes.
        facts: (name, text).
        notes: sentences that must not be missed.
    """

    title: str
    shots: Sequence[Shot]
    group: str = ""
    keys: Mapping[str, float | None] = field(default_factory=dict)
    scores: Sequence[tuple[str, float, float | None]] = ()
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Gallery:
    """Cards that can be filtered and sorted, if there are several groups and keys.

    Args:
        grouped_by: what the cards' groups are.
        signed: the maps are, in logits.
    """

    cards: Sequence[Card]
    grouped_by: str = ""
    title: str = ""
    foot: str = ""
    signed: bool = False
    template: ClassVar[str] = "gallery.html"

    @property
    def groups(self) -> list[str]:
        """The groups there are, by name; none if there is one alone."""
        found = sorted({card.group for card in self.cards if card.group})
        return found if len(found) > 1 else []

    @property
    def keys(self) -> list[str]:
        """What at least one card can be sorted by."""
        return list(dict.fromkeys(k for card in self.cards for k, v in card.keys.items() if v is not None))

    @property
    def gradient(self) -> str:
        """The colours of the maps."""
        return gradient(signed=self.signed)

    @property
    def ends(self) -> tuple[str, str, str]:
        """What is written below the colours."""
        return ("against", "0 logits", "for the class") if self.signed else ends(None)


@dataclass(frozen=True)
class NoteList:
    """(name, text) pairs that are unfolded by those who want to know."""

    title: str
    items: Sequence[tuple[str, str]]
    template: ClassVar[str] = "notes.html"


Part = ReportTable | Charts | Figure | Gallery | NoteList


@dataclass(frozen=True)
class Section:
    """A heading, and what is below it.

    Args:
        intro: a paragraph before the parts.
        empty: what is said where there are no parts.
        foot: small print after them.
        command: what made it.
    """

    title: str
    parts: Sequence[Part] = ()
    intro: str = ""
    empty: str = ""
    foot: str = ""
    command: str = ""


def render_page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    facts: Sequence[tuple[str, str]] = (),
    warnings: Sequence[str] = (),
    command: str = "",
    made: str = "",
) -> str:
    """The whole page.

    Args:
        lead: a paragraph below the title.
        facts: (name, text), in a list at the top.
        warnings: sentences that must not be missed, above everything else.
        command, made: how and when, at the foot.
    """
    return str(
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            sections=sections,
            lead=lead,
            facts=facts,
            warnings=warnings,
            command=command,
            made=made,
            css=(PAGES / "page.css").read_text(),
            script=(PAGES / "page.js").read_text(),
        )
    )


def can_report() -> bool:
    """Whether what pages are made with is installed."""
    return find_spec("jinja2") is not None


def require_report_extra() -> None:
    """DataError before the work begins if no page can be made."""
    if not can_report():
        raise DataError("a report needs the extra `report`: pip install 'sigcam[report]'.")


@cache
def _templates() -> Any:
    require_report_extra()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
