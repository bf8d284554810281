"""Makes what is handed out or shown beside the notebooks: a deck per lesson, the course and the cheat sheet as PDF.

    python tools/handout.py slides site/_build/slides notebooks/*.ipynb
    python tools/handout.py pdf site/_build/html site/_build

The decks are nbconvert's reveal slides. Which cell begins a slide follows from the notebook (`slide_types`): nobody
tags cells by hand. The PDF is the built site, printed by Chromium as one document, so that links between lessons hold
inside it. No notebook is executed, and nothing here or in a deck asks another host.
"""

import argparse
import html
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

HERE = Path(__file__).parent
VENDOR = HERE.parent / "site" / "_static" / "vendor"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ROOM = 24  # lines of text that fit on a slide
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")


class HandoutError(Exception):
    """What is missing, in words for who ran make."""


# Slides


def in_parts(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells, Markdown cut before each heading, so that a heading can begin a slide. Widgets are left out."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            cell.outputs = [o for o in cell.get("outputs", []) if WIDGET_VIEW not in o.get("data", {})]
            cells.append(cell)
            continue
        parts: list[list[str]] = [[]]
        fenced = False
        for line in cell.source.split("\n"):
            fenced ^= line.startswith("```")
            if not fenced and re.match(r"#{1,3} ", line) and parts[-1]:
                parts.append([])
            parts[-1].append(line)
        for part in parts:
            if "\n".join(part).strip():
                cells.append(nbformat.v4.new_markdown_cell("\n".join(part)))
    return cells


def lines_of(cell: NotebookNode) -> float:
    """About how many lines a cell takes on a slide."""
    if cell.cell_type == "markdown":
        visible = re.sub(r"(?s)<details>.*?</details>", "one line\n", cell.source)
        return (
            sum(1 + len(line) // 100 for line in visible.split("\n") if line.strip())
            + visible.count("\n\n") / 2
        )
    lines = 0.8 * (cell.source.count("\n") + 1) + 1
    for output in cell.outputs:
        data = output.get("data", {})
        shown = "".join(data.get("text/html", ""))
        if "<figure" in shown:
            lines += 14
        else:
            text = output.get("text") or output.get("evalue") or "".join(data.get("text/plain", ""))
            lines += 0.8 * (text.count("\n") + 1)
    return lines


def slide_types(cells: Sequence[NotebookNode]) -> list[str]:
    """What each cell is in a deck, by rule, in nbconvert's words.

    A heading of the first two levels begins a slide, one of the third, and an exercise, a slide below it. So does what
    no longer fits, and prose after code. Left out: the set-up, solutions, the checks right behind them, and what the
    notebook folds away.
    """
    types: list[str] = []
    filled, after_solution, first_code = 0.0, False, True
    for index, cell in enumerate(cells):
        tags = cell.metadata.get("tags", [])
        lines = lines_of(cell)
        if cell.cell_type == "code":
            folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
            left_out = "solution" in tags or after_solution or folded or first_code or not cell.source.strip()
            after_solution, first_code = "solution" in tags, False
            kind = "skip" if left_out else "-" if filled + lines <= ROOM else "subslide"
        else:
            after_solution = False
            head = re.match(r"(#{1,3}) ", cell.source)
            behind_code = index > 0 and cells[index - 1].cell_type == "code"
            if head:
                kind = "subslide" if len(head[1]) == 3 else "slide"
            elif re.search(r"(?m)^\*\*Exercise \d", cell.source) or behind_code or filled + lines > ROOM:
                kind = "subslide"
            else:
                kind = "-"
        if kind != "skip":
            filled = lines if kind != "-" else filled + lines
        types.append(kind)
    return types


def deck(notebook: NotebookNode, title: str) -> str:
    """The deck of one lesson, as HTML that looks for its scripts in assets/."""
    from nbconvert import SlidesExporter  # takes a second to import

    copy = nbformat.v4.new_notebook(metadata={"title": title, "language_info": {"name": "ipython"}})
    copy.cells = in_parts(notebook)
    for cell, kind in zip(copy.cells, slide_types(copy.cells), strict=True):
        cell.metadata["slideshow"] = {"slide_type": kind}
    exporter = SlidesExporter(
        template_name="slides",
        extra_template_basedirs=[str(HERE)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        reveal_url_prefix="assets",
    )
    text, _ = exporter.from_notebook_node(copy)
    text = text.replace("assets/dist/reveal.css", "assets/reveal.css")
    text = re.sub(r'<link[^>]*id="theme"[^>]*>', "", text)
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', text)


def slides(folder: Path, notebooks: Sequence[Path]) -> None:
    """Write a deck for each notebook, what they load, and a page that lists them."""
    import sphinxcontrib.katex as katex

    assets = folder / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    for path in (
        *(VENDOR / "reveal").iterdir(),
        VENDOR / "katex" / "katex.min.css",
        VENDOR / "katex" / "auto-render.min.js",
        HERE / "slides" / "deck.css",
        Path(katex.__file__).with_name("katex.min.js"),
    ):
        shutil.copy(path, assets)
    shutil.copytree(VENDOR / "katex" / "fonts", assets / "fonts", dirs_exist_ok=True)
    links = []
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        title = notebook.cells[0].source.split("\n")[0].lstrip("# ")
        (folder / f"{path.stem}.html").write_text(deck(notebook, title), "utf-8")
        links.append(f'<li><a href="{path.stem}.html">{html.escape(title)}</a></li>')
    (folder / "index.html").write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Slides</title>'
        "<style>body{font:20px/1.6 system-ui,sans-serif;max-width:40em;margin:2em auto;padding:0 1em}</style>"
        "<h1>Slides</h1><p>Arrow keys move, Esc shows all slides, F fills the screen.</p>"
        f"<ul style='list-style:none;padding:0'>{''.join(links)}</ul></html>",
        "utf-8",
    )


# The course on paper


def joined(site: Path, pages: Sequence[str]) -> str:
    """Some pages of the built site as one page: ids, and the links between these pages, made unique."""
    first = (site / "index.html").read_text("utf-8")
    head = first[: first.index("<body")]
    names = {name: re.sub(r"\W", "-", name) for name in pages}
    articles = []
    for name in pages:
        text = (site / f"{name}.html").read_text("utf-8")
        article = re.search(r"(?s)<article[^>]*>(.*)</article>", text)[1]  # type: ignore[index]
        base = Path(name).parent

        def target(match: re.Match[str], name: str = name, base: Path = base) -> str:
            path, _, fragment = html.unescape(match[2]).partition("#")
            if re.match(r"[a-z]+:", path):
                return match[0]
            parts: list[str] = []
            for part in (base / path).parts if path else Path(name).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            page = "/".join(parts).removesuffix(".html")
            if match[1] == "href" and page in names:
                return f'href="#{names[page]}--{fragment}"'
            return f'{match[1]}="{html.escape("/".join(parts))}"' if path else match[0]

        article = re.sub(r'\b(href|src)="([^"]*)"', target, article)
        article = re.sub(r'\bid="([^"]+)"', rf'id="{names[name]}--\1"', article)
        articles.append(f'<article class="sheet-of-paper" id="{names[name]}--">{article}</article>')
    breaks = "<style>.sheet-of-paper + .sheet-of-paper { break-before: page }</style>"
    # the folds are open on paper; the script that opens them waits for the print of a reader
    body = "\n".join(articles).replace("<details", "<details open")
    return f'{head}{breaks}<body data-theme="light">{body}</body></html>'


def print_page(page: Path, to: Path) -> None:
    """Print a page of this machine by Chromium."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        raise HandoutError("There is no Chromium here to print with (Debian: apt-get install chromium).")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += ["--no-pdf-header-footer", "--generate-pdf-document-outline"]  # bookmarks
        command += [f"--print-to-pdf={to}", page.resolve().as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode or not to.exists():
        raise HandoutError(f"Chromium did not print {page.name}:\n{result.stderr[-2000:]}")


def pdf(site: Path, folder: Path) -> list[Path]:
    """The whole course, and the cheat sheet on one page."""
    order = re.findall(
        r'<li class="toctree-l1"><a class="reference internal" href="([^"]+)\.html"', _sidebar(site)
    )
    pages = ["index", *dict.fromkeys(order)]
    sheet, course = folder / "cheatsheet.pdf", folder / "course.pdf"
    for path in (sheet, course):
        path.unlink(missing_ok=True)
    whole = site / ".course.html"  # beside the pages, so that it finds their pictures and styles
    whole.write_text(joined(site, pages), "utf-8")
    try:
        print_page(whole, course)
    finally:
        whole.unlink()
    print_page(site / "cheatsheet.html", sheet)
    return [course, sheet]


def _sidebar(site: Path) -> str:
    index = site / "index.html"
    if not index.exists():
        raise HandoutError(f"There is no site in {site}: run `make html` first.")
    return re.search(r'(?s)<div class="sidebar-tree">.*?</aside>', index.read_text("utf-8"))[0]  # type: ignore[index]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the number for the shell is 0 when all went well."""
    parser = argparse.ArgumentParser(prog="python tools/handout.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("slides", help="write a deck for each notebook")
    command.add_argument("folder", type=Path)
    command.add_argument("notebooks", nargs="+", type=Path)
    command = commands.add_parser("pdf", help="print the built site and the cheat sheet")
    command.add_argument("site", type=Path)
    command.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "slides":
            slides(options.folder, options.notebooks)
            print(f"The slides are at {(options.folder / 'index.html').resolve().as_uri()}")
        else:
            for path in pdf(options.site, options.folder.resolve()):
                print(path)
    except HandoutError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
