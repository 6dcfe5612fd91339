"""Parts of the reproduction: what `parts.toml` says, measured into docs/data/*.json; `scripts/reproduce` calls it."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from typing import Any

import measuring
from measuring import NotPossible

PARTS: dict[str, dict[str, Any]] = tomllib.loads((measuring.ROOT / "scripts" / "parts.toml").read_text("utf-8"))
INTERRUPTED = 130


def traces(part: dict[str, Any]) -> bool:
    """Whether a part replays recorded answers."""
    return any("peers" in one or "replay" in one or "_tokenizer}" in str(one) for one in part["data"].values())


def main() -> None:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description="See the head of scripts/reproduce.")
    parser.add_argument("parts", nargs="*", default=["list"], metavar="PART", help="list, all, or names of parts")
    parser.add_argument("--limit", type=int, help="a trial with so few prompts or rows")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured with this code")
    parser.add_argument("--traces", metavar="DIR")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--native", action="append", default=[], metavar="PATTERN=FILE")
    args = parser.parse_args()
    if args.parts == ["list"]:
        for name, part in PARTS.items():
            print(f"{name:<20}{part['minutes']:>4} min  {part['about']}{' [--traces]' if traces(part) else ''}")
        minutes = sum(part["minutes"] for part in PARTS.values() if not traces(part))
        print(f"{'all':<20}{minutes:>4} min  all that needs no traces, with --traces the others too")
        return
    names = args.parts
    if names == ["all"]:
        names = [name for name, part in PARTS.items() if args.traces or not traces(part)]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; see scripts/reproduce list")
    os.chdir(measuring.ROOT)
    for name in names:
        try:
            for data, how in PARTS[name]["data"].items():
                measuring.measure(args, data, how)
        except NotPossible as reason:
            sys.exit(f"{name}: {reason}")
        except KeyboardInterrupt:
            print(f"{name} was interrupted; the same command goes on with it.", file=sys.stderr)
            sys.exit(INTERRUPTED)
    if not args.limit:
        measuring.tool("scripts/generate_docs.py")


if __name__ == "__main__":
    main()
