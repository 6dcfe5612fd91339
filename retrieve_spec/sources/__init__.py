"""Cursor machines: what each source remembers, and which tokens it says come next."""

SOURCE_NAMES = (
    "context",
    "session",
    "prediction",
    "recycling",
    "ngram",
    "exact",
    "dense",
    "script",
    "phrases",
    "alignment",
    "bigrams",
    "distilled",
    "forced",
)
"""Names by the number stored in `DraftTree.source`; statistics are reported by these names."""
CONTEXT, SESSION, PREDICTION, RECYCLING, NGRAM, EXACT, DENSE, SCRIPT = range(8)
PHRASES, ALIGNMENT, BIGRAMS, DISTILLED, FORCED = range(8, len(SOURCE_NAMES))
