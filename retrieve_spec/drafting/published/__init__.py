"""Published drafting rules as drafters, so that they can be compared inside one verifier."""
