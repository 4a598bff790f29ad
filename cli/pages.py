"""`ycore docs`: the pages in their order, one page or section, a search, and the section that explains an error."""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Annotated, NamedTuple

import typer
from ycore_cli.output import print_table

from ycore.errors import ConfigError, nearest

DocsWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="PAGE|WORDS", help="A page's name, or words to search for."),
]

_LINK = re.compile(r"^- \[(.+?)\]\((\w[\w-]*)\.md\): (.+)$", re.MULTILINE)
_OF_QUESTIONS = " a an can do does how i in is it my of the to use what where why with "
_SYMPTOM = re.compile(r"^It says: (.+)$", re.MULTILINE)


class Section(NamedTuple):
    """A heading of a page with the text below it, up to the next heading."""

    page: str
    heading: str
    text: str

    @property
    def address(self) -> str:
        """Return the words with which `ycore docs` prints this section alone."""
        anchor = re.sub(r"[^\w -]", "", self.heading).strip().lower().replace(" ", "-")
        return f"{self.page}#{anchor}"


def docs(words: DocsWords = None) -> None:
    """Print a page of the documentation, or find one by words.

    \b
    ycore docs                 the pages, in the order to read them in
    ycore docs rewards
    ycore docs OpenAI as a judge
    ycore docs skill           ycore in one page, for coding agents and for people
    """
    pages = read_pages()
    wanted = " ".join(words or ())
    page, _, anchor = wanted.partition("#")
    if not wanted:
        for group, entries in read_order(pages["index"]).items():
            print(group)
            print_table((f"  {name}", title) for name, title in entries.items())
        print("Print one with `ycore docs PAGE`, or search with `ycore docs WORDS`.")
    elif wanted in pages:
        _print_markdown(pages[wanted])
    elif anchor and page in pages:
        known = {section.address: section for section in sections(page, pages[page])}
        if wanted not in known:
            raise ConfigError(f"no section {wanted!r}{nearest(wanted, known, limit=1)}")
        _print_markdown(known[wanted].text)
    else:
        places = search(pages, wanted)
        if not places:
            raise ConfigError(f"no page has {wanted!r}; `ycore docs` lists the pages")
        print_table((f"ycore docs {place.address}", place.heading) for place in places)


def read_pages() -> dict[str, str]:
    """Return the installed pages by name, without the marks of generated parts."""
    return {
        entry.name.removesuffix(".md"): re.sub(
            r"^<!--.*-->\n", "", entry.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        for entry in files("ycore_docs").iterdir()
        if entry.name.endswith(".md")
    }


def read_order(index: str) -> dict[str, dict[str, str]]:
    """Return the titles of the pages by group and name, in the order of the index."""
    groups = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    return {
        group.partition("\n")[0]: {name: title for title, name, _ in _LINK.findall(group)}
        for group in groups
    }


def sections(page: str, text: str) -> Iterator[Section]:
    """Cut a page at its headings; a comment in a fenced block is none."""
    heading = ""
    lines = list[str]()
    in_block = False
    for line in text.splitlines(keepends=True):
        in_block ^= line.startswith("```")
        if line.startswith("#") and not in_block:
            if heading:
                yield Section(page, heading, "".join(lines))
            heading, lines = line.lstrip("#").strip(), []
        lines.append(line)
    yield Section(page, heading, "".join(lines))


def search(pages: Mapping[str, str], query: str) -> list[Section]:
    """Rank sections by SQLite's full-text search: rare words first, in headings above titles above text."""
    import sqlite3

    words = re.findall(r"\w+", query.lower())
    words = [word for word in words if f" {word} " not in _OF_QUESTIONS] or words
    if not words:
        return []
    about = {
        name: f"{name} {title} {text}" for title, name, text in _LINK.findall(pages["index"])
    }
    places = [
        section
        for name, text in pages.items()
        if name != "index"
        for section in sections(name, text)
    ]
    rows = [
        (place.heading, about.get(place.page, ""), re.sub(r"\d+\.\d+", "", place.text))
        for place in places
    ]
    with sqlite3.connect(":memory:") as table:
        table.execute(
            "create virtual table places using fts5(heading, about, text, tokenize=porter)"
        )
        table.executemany("insert into places values (?, ?, ?)", rows)
        ranked = table.execute(
            "select rowid from places where places match ? order by bm25(places, 3.5, 3.5) limit 5",
            [" OR ".join(f'"{word}"{"*" * (len(word) > 3)}' for word in words)],
        ).fetchall()
    return [places[rowid - 1] for (rowid,) in ranked]


def explanation(error: str) -> str:
    """Return where to read on, for an error that `troubleshooting.md` quotes (`It says:`), else nothing.

    Dots in a quotation stand for the values of the error.
    """
    text = files("ycore_docs").joinpath("troubleshooting.md").read_text(encoding="utf-8")
    for section in sections("troubleshooting", text):
        for line in _SYMPTOM.findall(section.text):
            for quoted in re.findall(r"`([^`]+)`", line):
                pattern = ".*".join(map(re.escape, quoted.split("...")))
                if re.search(pattern, error):
                    return f"{' See' if error[-1] == '?' else '; see'} `ycore docs {section.address}`"
    return ""


def _print_markdown(text: str) -> None:
    """Print a page as it is written, and in a terminal with its tables drawn."""
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
