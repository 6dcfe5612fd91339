"""Drafting: from the cursors of all sources to one tree."""
