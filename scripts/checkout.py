"""The checkout that a script stands in, ahead of any installed one: scripts import this before the package.

Where another program imports a script (a test), the path is that program's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_started = getattr(sys.modules["__main__"], "__file__", None)
if _started is not None and any(Path(_started).resolve().is_relative_to(ROOT / name) for name in ("scripts", "tools")):
    sys.path.insert(1, str(ROOT))  # behind the folder of the script
    # Processes that the script starts inherit it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
