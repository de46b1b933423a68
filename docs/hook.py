"""How the documentation becomes a site: mkdocs calls ``on_config`` first, ``on_files`` before it reads the pages, and
``on_post_build`` behind.

Pages are written so that they read well where they lie, on a code host or in an editor. On the way into the site

* the pages of methods join the navigation, each in the group that its first lines name;
* the pages of methods, of the results, the contributing guide and the changelog get what `generate.py` knows;
* links to files of the repository lead to pages that show those files, so the site needs no other host;
* drawings are laid into the page, where they take the colours of the theme.

A site that would ask another host for anything is refused: who reads the documentation tells nobody.
"""

from __future__ import annotations

import os
import re
import sys
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.utils import meta

sys.path.insert(0, str(Path(__file__).resolve().parent))
import generate

ROOT = generate.ROOT
DOCS = ROOT / "docs"
LINK = re.compile(r"(\[[^\]\n]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]*drawings/[^)\s]+\.svg)\)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".md": "markdown"}

# Files of the repository that are pages of the site under another name.
ELSEWHERE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}


def pages() -> dict[str, tuple[str, Path]]:
    """Address in the site -> its Markdown, and the folder from which its links are written."""
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        uri = path.relative_to(DOCS).as_posix()
        text = path.read_text(encoding="utf-8")
        if uri == "methods/index.md":
            text += "\n\n" + generate.overview()
        elif uri.startswith("methods/"):
            text += "\n\n" + generate.generated(path.stem)
        found[uri] = text, path.parent
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        found[ELSEWHERE[name]] = (ROOT / name).read_text(encoding="utf-8"), ROOT
    found["results.md"] = RESULTS_INTRODUCTION + generate.results(), generate.RESULTS
    return found


def with_methods(nav: list[Any], folder: Path = DOCS / "methods") -> list[Any]:
    """The navigation of `mkdocs.yml` with the pages of ``folder`` below "Methods": each in the ``group`` that it names,
    sorted by ``order``, then by name. A page without an order stands behind the others, one without a group at the end.
    """
    nav = deepcopy(nav)
    (methods,) = (item["Methods"] for item in nav if isinstance(item, dict) and "Methods" in item)
    groups = {title: pages for item in methods if isinstance(item, dict) for title, pages in item.items()}
    groups = {title: pages for title, pages in groups.items() if isinstance(pages, list)}
    known = {path: meta.get_data(path.read_text(encoding="utf-8"))[1] for path in sorted(folder.glob("*.md"))}
    for path in sorted(known, key=lambda path: known[path].get("order", len(known))):
        group = known[path].get("group")
        if group is not None and group not in groups:
            raise PluginError(f"methods/{path.name} names the group {group!r}; mkdocs.yml has {', '.join(groups)}")
        if path.stem != "index":
            (methods if group is None else groups[group]).append(f"methods/{path.name}")
    return nav


def on_config(config: Any) -> Any:
    config.nav = with_methods(config.nav)
    return config


RESULTS_INTRODUCTION = """# Results

Every table on this page was written by the script that is named above it, from the JSON that the same run committed to
`benchmarks/results/`. With `--quick` each script measures the same on less.

"""


def home(target: Path) -> str:
    """Where the site shows a file of the repository."""
    path = target.relative_to(ROOT).as_posix()
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    if target.parent == generate.RESULTS and target.suffix == ".md":
        return f"results.md#{target.stem}"
    return f"source/{path}.md"


def relinked(text: str, uri: str, folder: Path) -> tuple[str, set[Path]]:
    """The text with its links to files as links within the site, and the files that the site has to show for them."""
    wanted = set()

    def moved(match: re.Match[str]) -> str:
        before, target, behind = match.groups()
        file = (folder / target).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            return match[0]  # the address of a page that is made while building, or of somebody else
        found = home(file)
        if found.startswith("source/"):
            wanted.add(file)
        path, _, anchor = found.partition("#")
        address = os.path.relpath(path, os.path.dirname(uri) or ".")
        return before + address + (f"#{anchor})" if anchor else behind)

    return LINK.sub(moved, text), wanted


def drawn(text: str, folder: Path) -> str:
    def laid_in(match: re.Match[str]) -> str:
        svg = (folder / match[2]).read_text(encoding="utf-8").strip()
        return f'<figure class="drawn" role="img" aria-label="{match[1]}">\n{svg}\n</figure>'

    return DRAWING.sub(laid_in, text)


def shown(path: Path) -> str:
    """A page that shows a file, or lists a folder. The search leaves these out."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        content = "\n".join(sorted(child.name + "/" * child.is_dir() for child in path.iterdir()))
    else:
        content = path.read_text(encoding="utf-8")
    fence = "`" * 8
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# `{name}`\n\n{fence}{language}\n{content.rstrip()}\n{fence}\n"


def on_files(files: Files, config: Any) -> Files:
    left_out = {file.src_uri for file in files if file.inclusion.is_excluded()}
    sources: set[Path] = set()
    for uri, (text, folder) in pages().items():
        if uri in left_out:
            continue
        written = files.get_file_from_path(uri)
        if written is not None:
            files.remove(written)
        text, wanted = relinked(drawn(text, folder), uri, folder)
        sources |= wanted
        files.append(File.generated(config, uri, content=text))
    for path in sorted(sources):
        hidden = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, home(path), content=shown(path), inclusion=hidden))
    return files


class Requests(HTMLParser):
    """Collects what a page fetches from other hosts by itself: everything but links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        fetched = [values.get("src", ""), values.get("srcset", ""), values.get("data", "")]
        if tag == "link":
            fetched.append(values.get("href", ""))
        self.found += [value for value in fetched if re.match(r"(\w+:)?//", value)]
        if "mermaid" in values.get("class", "").split():
            self.found.append("the library that draws class=mermaid")


def requests(page: str) -> list[str]:
    reader = Requests()
    reader.feed(page)
    return reader.found


STYLE = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


def foreign(site: Path) -> list[str]:
    """The addresses of other hosts that the pages and styles of a built site would fetch."""
    readers = {"*.html": requests, "*.css": STYLE.findall}
    return [
        f"{path.relative_to(site)}: {address}"
        for pattern, read in readers.items()
        for path in sorted(site.rglob(pattern))
        for address in read(path.read_text(encoding="utf-8"))
    ]


def on_post_build(config: Any) -> None:
    found = foreign(Path(config.site_dir))
    if found:
        raise PluginError("the site would ask other hosts, which is not wanted: " + "; ".join(sorted(set(found))[:5]))
