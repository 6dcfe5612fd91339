"""Integrations: drafts for engines that people serve with, which hold the model and its cache themselves.

`ServingDrafter` is what they share; it needs no torch. Each engine's own door is a module of its own, which is imported
where that engine is installed. `trl` is what a trainer calls to sample from an accelerated model.
"""

from retrieve_spec.integrations.serving import ServingDrafter

__all__ = ["ServingDrafter"]
