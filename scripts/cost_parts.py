"""Parts of `scripts/reproduce` that measure costs, not speed-ups, as runs of the benchmark scripts."""

from __future__ import annotations

import argparse
import sysconfig

import measuring
from measuring import script

WORKSPACES = ("uvicorn", "sympy")
"""Packages in which the server's own time is measured: a small and a large one."""
PACKAGES = sysconfig.get_paths()["purelib"]
KEYS = 400_000
"""Of the dense indexes that are compared."""


def terminal(args: argparse.Namespace) -> None:
    """The README's recording of a terminal."""
    script(args, "terminal", "scripts/record_terminal.py", *(["--new-tokens", "16"] if args.limit else []))


def batches(args: argparse.Namespace) -> None:
    """Batches of the bundled model beside the original `generate`."""
    few = ["--rows", "1", "2", "--runs", "1", "--new-tokens", "16"]
    script(args, "batches", "scripts/bench_batches.py", *(few if args.limit else []))


def arrivals(args: argparse.Namespace) -> None:
    """Requests that arrive at random."""
    few = ["--arrivals", "4", "--within", "2", "--new-tokens", "16"]
    script(args, "arrivals", "scripts/bench_batches.py", *(few if args.limit else ["--arrivals", "32"]))


def rollouts(args: argparse.Namespace) -> None:
    """Rows that end one after the other, and epochs over the same prompts."""
    few = ["--prompts", "2", "--samples", "2", "--new-tokens", "16", "--temperature", "1", "--epochs", "2"]
    script(args, "rollouts", "scripts/bench_rollouts.py", *(few if args.limit else []))


def passes(args: argparse.Namespace) -> None:
    """What a pass costs."""
    script(args, "passes", "scripts/bench_pass.py", *(["--repeats", "2"] if args.limit else []))


def datastores(args: argparse.Namespace) -> None:
    """A store of all installed packages, continued to 100 M tokens."""
    size = ["--tokens", "1e6", "--real", "1e6"] if args.limit else ["--tokens", "100e6", "--real", "40e6"]
    words = ["--text", PACKAGES, *size, "--peer-tokens", "0"]
    script(args, "datastores", "scripts/bench_datastore.py", *words)


def datastore_changes(args: argparse.Namespace) -> None:
    """Builds by one and two workers, and changes of what they built."""
    size = ["--tokens", "1e6", "--files", "300"] if args.limit else []
    script(args, "datastores-changes", "scripts/bench_store_changes.py", "--text", PACKAGES, *size)


def datastore_segments(args: argparse.Namespace) -> None:
    """A store a hundred times over, in a hundred segments."""
    size = ["--tokens", "1e6", "--real", "1e6"] if args.limit else ["--tokens", "10e6", "--real", "10e6"]
    words = ["--text", PACKAGES, *size, "--peer-tokens", "0", "--segments", "100"]
    script(args, "datastores-segments", "scripts/bench_datastore.py", *words)


def datastore_peers(args: argparse.Namespace) -> None:
    """What others make of the same text, at a million tokens."""
    size = ["--tokens", "2e6", "--real", "2e6", "--peer-tokens", "2e5" if args.limit else "1e6"]
    with measuring.suffix_decoding():
        script(args, "datastores-peers", "scripts/bench_datastore.py", "--text", PACKAGES, *size)


def dense(args: argparse.Namespace) -> None:
    """Dense indexes of hidden states of the standard library."""
    store, _ = measuring.stores(args)
    size = ["--vectors", str(4000 if args.limit else KEYS)]
    queries = ["--queries", f"{PACKAGES}/networkx"]  # held out of the model's training, and not in the store
    words = [str(store), *queries, *size, "--index", "ivf-pq", "hnsw", "--thinning"]
    script(args, "dense", "scripts/bench_dense.py", *words)


def typing(args: argparse.Namespace) -> None:
    """Typing in an editor, and the server's own time per request."""
    script(args, "typing", "scripts/bench_typing.py", *(["--sessions", "1", "--keys", "3"] if args.limit else []))
    spaces = WORKSPACES[:1] if args.limit else WORKSPACES
    script(args, "typing-overhead", "scripts/bench_typing.py", "--overhead", *spaces)
