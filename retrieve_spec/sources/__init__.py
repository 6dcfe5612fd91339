"""Sources of drafts: each remembers texts, and has cursors that list possible next tokens."""

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
    "states",
    "forced",
)
"""Names by the number in `DraftTree.source`; statistics use these names."""
CONTEXT, SESSION, PREDICTION, RECYCLING, NGRAM, EXACT, DENSE, SCRIPT = range(8)
PHRASES, ALIGNMENT, BIGRAMS, DISTILLED, STATES, FORCED = range(8, len(SOURCE_NAMES))
