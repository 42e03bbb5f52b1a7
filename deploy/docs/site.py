"""mkdocs hook: the documents of the repository's root are pages too, and the navigation follows the folders.

Root documents link to `docs/...`, pages under `docs/` link to `../NAME.md`. Both forms work where a
repository shows them; on the site this hook rewrites them. A new page appears without an entry anywhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]

ROOT_PAGES = (
    "README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "PAPERS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
SECTIONS = ("concepts", "operations", "reference", "testing", "decisions")

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def root_pages() -> list[str]:
    return [name for name in ROOT_PAGES if (CHECKOUT / name).exists()]


def page_of(path: str) -> str:
    """The site's page of a path in the repository: `docs/a/b.md` is `a/b.md`, README.md the start page."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "index.md" if path == "README.md" else path


def site_links(markdown: str, path: str) -> str:
    """`markdown` of the repository's file `path`, its links made relative to its page on the site.

    A link to a file that is no page becomes its text with the path, since the site has no source files.
    """
    here = posixpath.dirname(path)
    pages = set(root_pages())
    from_page = posixpath.dirname(page_of(path))

    def mend(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(here, target))
        if file in pages or (file.startswith("docs/") and (CHECKOUT / file).is_file()):
            return f"[{text}]({posixpath.relpath(page_of(file), from_page or '.')}{anchor})"
        if (CHECKOUT / file).exists():
            return f"{text} (`{file}`)" if text.strip("`") != file else f"`{file}`"
        return match[0]  # mkdocs warns about it, and a strict build fails

    out, at = [], 0
    for code in _CODE.finditer(markdown):
        out += [_LINK.sub(mend, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*out, _LINK.sub(mend, markdown[at:])])


def title_of(path: Path) -> str:
    found = _TITLE.search(path.read_text(encoding="utf-8"))
    return found[1].replace("`", "") if found else path.stem


def navigation() -> list[dict[str, Any]]:
    """Root documents first, then each section: its index, then its pages by name."""
    nav: list[dict[str, Any]] = []
    for name in root_pages():
        title = "Relume" if name == "README.md" else title_of(CHECKOUT / name)
        nav.append({title: page_of(name)})
    for section in SECTIONS:
        folder = CHECKOUT / "docs" / section
        pages = sorted(folder.glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
        if pages:
            nav.append(
                {section.capitalize(): [{title_of(p): f"{section}/{p.name}"} for p in pages]}
            )
    return nav


def on_config(config: Any) -> Any:
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in root_pages():
        text = (CHECKOUT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page_of(name), content=site_links(text, name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in {page_of(name) for name in root_pages()}:
        return markdown
    return site_links(markdown, f"docs/{page.file.src_uri}")
