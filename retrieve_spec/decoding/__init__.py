"""Decoding: draft, verify, commit, learn."""
