"""Loading as a program does it: what a library must leave to whose process it is."""

from __future__ import annotations

import gc


def begin_loading() -> None:
    """Look for no garbage from now on: a model and its libraries leave half a million objects, and next to none of it.

    To be called before they are imported.
    """
    gc.disable()


def end_loading() -> None:
    """Look for garbage again, among what is made from now on: all that is there stays for as long as the process.

    Else a collection takes a third of a second now and then, in which everybody waits.
    """
    gc.freeze()
    gc.enable()
