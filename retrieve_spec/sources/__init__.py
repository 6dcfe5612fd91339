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
    "forced",
)
"""Names by the number stored in `DraftTree.source`; statistics are reported by these names."""
(CONTEXT, SESSION, PREDICTION, RECYCLING, NGRAM, EXACT, DENSE, SCRIPT, PHRASES, ALIGNMENT, BIGRAMS, FORCED) = range(
    len(SOURCE_NAMES)
)
