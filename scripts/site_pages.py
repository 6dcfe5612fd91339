"""Hooks of the documentation site (`make site`): README.md and CHANGELOG.md as pages, links to other files as names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand at the top of the checkout."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Keep links to pages; a file that is no page is named, not linked."""

    def kept(link: re.Match[str]) -> str:
        _, label, target, _ = link.groups()
        inside = PAGES.get(target.removeprefix("../"), target)
        if files.get_file_from_path(inside) is not None:
            return link[0].replace(f"({target}", f"({inside}")
        name = target.removeprefix("../")
        return f"`{name}`" if label in (name, target) else f"{label} (`{name}`)"

    return _LINK.sub(kept, markdown)
