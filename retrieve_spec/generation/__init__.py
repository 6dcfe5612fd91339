"""Calls of an accelerated model: `generate`, `generate_stream` and `generate_many`, all callers of one engine."""
