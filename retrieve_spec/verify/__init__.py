"""Verifying: one forward pass of any Hugging Face decoder over a draft tree, and what a model's forward takes."""
