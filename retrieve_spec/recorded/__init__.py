"""Recorded passes: a model's forward as one flat list of tensor operations over preallocated keys and values."""
