"""Pages: one self-contained HTML file of tables, charts and images; all text is escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from sigcam.core.errors import MissingExtra
from sigcam.drawing.overlay import ends, gradient

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Number:
    """A number in a table."""

    value: float
    low: float | None = None  # ends of its interval
    high: float | None = None
    difference: tuple[float, float, float] | None = None  # from the baseline row, and ends of its interval
    better: bool | None = None  # whether the difference is significantly better (True) or worse (False)
    note: str = ""  # text below the number
    digits: int = 2

    @property
    def text(self) -> str:
        return f"{self.value:.{self.digits}f}"


@dataclass(frozen=True)
class ReportTable:
    """Rows of numbers or text under a header; the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Number | str | None]]]
    title: str = ""
    foot: str = ""
    template: ClassVar[str] = "table.html"


@dataclass(frozen=True)
class Charts:
    """Charts of `line_chart`, side by side."""

    figures: Sequence[str]
    title: str = ""
    foot: str = ""
    template: ClassVar[str] = "charts.html"


@dataclass(frozen=True)
class Shot:
    """An image: its data URI, alternative text, and caption."""

    source: str
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A wide image of its own."""

    shot: Shot
    title: str = ""
    template: ClassVar[str] = "figure.html"


@dataclass(frozen=True)
class Card:
    """One image of a gallery."""

    title: str
    shots: Sequence[Shot]
    group: str = ""  # value of the gallery's filter
    keys: Mapping[str, float | None] = field(default_factory=dict)  # values to sort by; None if missing
    scores: Sequence[tuple[str, float, float | None]] = ()  # name, probability, evidence of likely classes
    facts: Sequence[tuple[str, str]] = ()  # (name, text) pairs
    notes: Sequence[str] = ()  # warnings


@dataclass(frozen=True)
class Gallery:
    """Cards that can be filtered if there are several groups, and sorted if there are keys."""

    cards: Sequence[Card]
    grouped_by: str = ""  # label of the filter
    title: str = ""
    foot: str = ""
    signed: bool = False  # the maps are signed, in logits
    template: ClassVar[str] = "gallery.html"

    @property
    def groups(self) -> list[str]:
        """The groups of the cards, sorted; empty if there is only one."""
        groups = sorted({card.group for card in self.cards if card.group})
        return groups if len(groups) > 1 else []

    @property
    def keys(self) -> list[str]:
        """The keys that at least one card has."""
        return list(dict.fromkeys(k for card in self.cards for k, v in card.keys.items() if v is not None))

    @property
    def gradient(self) -> str:
        """The colours of the maps, as CSS."""
        return gradient(signed=self.signed)

    @property
    def ends(self) -> tuple[str, str, str]:
        """Text below the colour bar: left, middle, right."""
        return ("against", "0 logits", "for the class") if self.signed else ends(None)


@dataclass(frozen=True)
class NoteList:
    """(name, text) pairs, folded by default."""

    title: str
    items: Sequence[tuple[str, str]]
    template: ClassVar[str] = "notes.html"


Part = ReportTable | Charts | Figure | Gallery | NoteList


@dataclass(frozen=True)
class Section:
    """A heading with its parts."""

    title: str
    parts: Sequence[Part] = ()
    intro: str = ""  # paragraph before the parts
    empty: str = ""  # text to show if there are no parts
    foot: str = ""  # small print after the parts
    command: str = ""  # the command that made it


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
    """Render the page.

    Args:
        lead: paragraph below the title.
        facts: (name, text) pairs at the top.
        warnings: shown above everything else.
        command, made: how and when it was made, in the footer.
    """
    text = (
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
            css=(TEMPLATES / "page.css").read_text(),
            script=(TEMPLATES / "page.js").read_text(),
        )
    )
    return str(text)


def can_report() -> bool:
    """Whether the packages that pages need are installed."""
    return find_spec("jinja2") is not None


def require_report_extra() -> None:
    """MissingExtra if pages cannot be made, to be called before any work."""
    if not can_report():
        raise MissingExtra("a report", "jinja2", "report")


@cache
def _templates() -> Any:
    require_report_extra()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, **options)
