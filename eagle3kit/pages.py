"""The HTML behind the report: a notebook's outputs as a fragment, and the frame around it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup, Tag
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from eagle3kit import words

TEMPLATES = Path(__file__).parent / "templates"
SHOWN = ("image/png", "image/jpeg", "text/html", "text/markdown", "text/plain")  # no script, no widgets
ACTIVE = ("script", "iframe", "object", "embed", "link", "meta", "base", "form", "video", "audio", "svg")
NUMBER = re.compile(r"^\s*[-+±~≈]?[\d,.]+(e[-+]?\d+)?(\s?[^\s\d]{1,6}){0,2}\s*$|^\s*[-–]?\s*$")


def page(template: str, **values: Any) -> str:
    """One whole page; every value is escaped unless it is Markup."""
    pages = Environment(loader=FileSystemLoader(TEMPLATES / "pages"), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)
    pages.filters["tied"] = words.tied
    pages.globals |= {"three": words.three, "percent": words.percent, "between": words.between}
    return pages.get_template(template).render(**values)


def fragment(executed: bytes | None, name: str, question: str, headline: str) -> tuple[Markup, Markup]:
    """(title, body) of an executed notebook as safe HTML: its first markdown cell, and what follows as far as it ran.

    `headline` is what `stage.finish` returned: its echo is left out. Without a readable notebook the body says so.
    """
    title = Markup("<h1>{}</h1>").format(question or name)
    if executed is None:
        return title, Markup("<p>The executed notebook is not in this folder, or was cut off while it was written.</p>")
    notebook = nbformat.reads(executed.decode(), as_version=4)
    cells = [cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]
    ran = [place for place, cell in enumerate(cells) if cell.get("execution_count") is not None]
    cells = cells[: max(ran, default=0) + 1]
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_shown, cell.outputs) if output and not _is(output, headline)]
    if len(cells) > 2 and cells[-1].cell_type == "code" and not cells[-1].outputs:
        cells = cells[: -2 if cells[-2].cell_type == "markdown" else -1]  # words that only lead to the finish
    first, rest = ([cells[0]], cells[1:]) if cells and cells[0].cell_type == "markdown" else ([], cells)
    if first:
        title = _html(notebook, first)
    return title, _html(notebook, rest, headings_from=2)


def _shown(output: NotebookNode) -> NotebookNode | None:
    """An output cut down to what a page may hold; None when nothing is left. What was printed is in the log."""
    if output.output_type == "error":
        return output
    if output.output_type not in ("display_data", "execute_result"):
        return None
    output.output_type = "display_data"
    widget = "application/vnd.jupyter.widget-view+json" in output.data
    output.data = {kind: data for kind, data in output.data.items() if kind in SHOWN}
    return output if output.data and not widget else None


def _is(output: NotebookNode, headline: str) -> bool:
    """Whether an output is only the echo of the headline that `stage.finish` returns."""
    return output.get("data", {}).get("text/plain") in (repr(headline), headline) and len(output["data"]) == 1


@cache
def _exporter() -> HTMLExporter:
    return HTMLExporter(template_name="report", extra_template_basedirs=[str(TEMPLATES)], exclude_anchor_links=True)


def _html(notebook: NotebookNode, cells: list[NotebookNode], headings_from: int = 1) -> Markup:
    part = NotebookNode(notebook, cells=cells)
    return Markup(tidy(_exporter().from_notebook_node(part)[0], headings_from))


def tidy(html: str, headings_from: int = 1) -> str:
    """`html` without anything that runs or loads: external addresses become text, wide things get a box to scroll in.

    Headings start at level `headings_from`, pictures without a text alternative are numbered.
    """
    soup = BeautifulSoup(html, "html.parser")
    for active in soup.find_all(ACTIVE):
        active.decompose()
    for style in soup.find_all("style"):
        if re.search(r"url\(|@import", style.string or ""):
            style.decompose()
    for tag in soup.find_all(True):
        for attribute in [name for name in tag.attrs if name.startswith("on") or name in ("srcset", "background")]:
            del tag[attribute]
        if re.search(r"url\(", str(tag.get("style", ""))):
            del tag["style"]
    for link in soup.find_all("a"):
        address = str(link.get("href", ""))
        if re.match(r"\s*(https?:)?//", address):
            shown = address.split("//", 1)[1]
            link.replace_with(link.get_text() + ("" if shown in link.get_text() else f" ({shown})"))
        elif not re.match(r"[\w./#-]*$", address):
            link.unwrap()
    for number, picture in enumerate(soup.find_all("img"), 1):
        if not str(picture.get("src", "")).startswith("data:image/"):
            picture.replace_with(picture.get("alt") or "")
        elif not picture.get("alt"):
            picture["alt"] = f"Figure {number}, without a description"
    for heading in soup.find_all(re.compile("^h[1-6]$")):
        heading.name = f"h{max(int(heading.name[1]), headings_from)}"
    for table in soup.find_all("table"):
        _box(soup, table)
    return str(soup)


def _box(soup: BeautifulSoup, table: Tag) -> None:
    """Let a table scroll inside its own box; columns of words go to the left, and short ones are not broken."""
    caption = table.find("caption")
    box = soup.new_tag("div", attrs={"class": "wide", "tabindex": "0", "role": "region"})
    box["aria-label"] = caption.get_text(strip=True) if caption and caption.get_text(strip=True) else "Table"
    table.attrs = {name: value for name, value in table.attrs.items() if name in ("id", "class")}
    table.wrap(box)
    rows = [row.find_all(["th", "td"], recursive=False) for row in table.find_all("tr")]
    for place in range(max(map(len, rows), default=0)):
        column = [row[place] for row in rows if len(row) > place]
        looks = ["short"] if max(len(cell.get_text(strip=True)) for cell in column) <= 24 else []
        if not all(NUMBER.match(cell.get_text()) for cell in column if cell.name == "td"):
            looks.append("text")
        for cell in column:
            cell["class"] = [*cell.get("class", []), *looks]
