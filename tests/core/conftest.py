"""`pytest tests/core/test_scheduler_machine.py -m slow --hypothesis-profile=ten-thousand` runs as many."""

from hypothesis import settings

settings.register_profile("ten-thousand", max_examples=10_000)
