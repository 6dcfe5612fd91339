"""Says where this user's files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "RETRIEVE_SPEC_CACHE"


def cache_dir() -> Path:
    """Folder for what can be made again (stores the demo built, measured costs); not created here.

    `RETRIEVE_SPEC_CACHE` names it; otherwise it follows the XDG rule: `$XDG_CACHE_HOME/retrieve-spec`, by default
    `~/.cache/retrieve-spec`.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "retrieve-spec"
