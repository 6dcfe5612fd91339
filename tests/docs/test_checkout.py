"""Scripts run the package of the checkout they stand in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_another_installed_package_is_not_imported(tmp_path: Path) -> None:
    other = tmp_path / "installed" / "retrieve_spec"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the other package')")
    script = ROOT / "scripts" / f"_{tmp_path.name}.py"
    check = "import retrieve_spec, subprocess, sys; print(retrieve_spec.__file__, flush=True)"
    child = "subprocess.run([sys.executable, '-c', 'import retrieve_spec; print(retrieve_spec.__file__)'])"
    script.write_text(f"import harness\n{check}; {child}\n")
    environment = {**os.environ, "PYTHONPATH": str(other.parent)}
    try:
        done = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    finally:
        script.unlink()
    assert done.stdout.split() == [str(ROOT / "retrieve_spec" / "__init__.py")] * 2, done.stderr
