"""How often Python looks for reference cycles while requests are served."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 100_000  # per collection of the young; Python's own 700 is every other step of 256 rows


def collect_rarely() -> None:
    """Call once everything is set up: what is there now is never looked at again, and new objects rarely are.

    A step makes thousands of short-lived tuples and no cycles to speak of. Left alone, collections take a fifth of the
    scheduler's time, and each full one walks every cached page.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 50)
