"""The engine: draft, verify, commit, learn."""
