from __future__ import annotations

from hypothesis import settings

settings.register_profile("compiled", deadline=None)  # the first example compiles
settings.load_profile("compiled")
