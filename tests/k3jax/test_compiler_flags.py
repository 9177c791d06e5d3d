"""Loops stay on the GPU unless the user has chosen otherwise."""

import pytest

from k3jax import compiler_flags
from k3jax.compiler_flags import LOOPS_ON_THE_GPU, keep_loops_on_the_gpu


@pytest.mark.parametrize(
    ("has_plugin", "before", "after"),
    [
        (True, "", LOOPS_ON_THE_GPU),
        (True, "--xla_dump_to=x", f"--xla_dump_to=x {LOOPS_ON_THE_GPU}"),
        (True, "--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
        (False, "--xla_dump_to=x", "--xla_dump_to=x"),
    ],
)
def test_the_flag_is_added_once_and_only_where_a_gpu_can_be(monkeypatch, has_plugin, before, after):
    monkeypatch.setattr(compiler_flags.importlib.util, "find_spec", lambda name: object() if has_plugin else None)
    monkeypatch.setenv("XLA_FLAGS", before)
    keep_loops_on_the_gpu()
    keep_loops_on_the_gpu()
    assert compiler_flags.os.environ["XLA_FLAGS"] == after
