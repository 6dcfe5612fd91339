"""Tree attention: masks of draft trees, and attention backends that take them."""
