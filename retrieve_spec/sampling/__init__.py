"""Sampling: the target's next token at every node of a verified tree, and where a text stops."""
