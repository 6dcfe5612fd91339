"""Custom generation: what `generate(..., custom_generate=FOLDER)` runs, `retrieve_spec.integrations.transformers`."""

from retrieve_spec.integrations.transformers import generate

__all__ = ["generate"]
