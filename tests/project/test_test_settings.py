"""What the tests' own settings promise: eight devices, 64-bit types on request, and no test left out unnoticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tracked import REPOSITORY


def test_eight_devices_are_there_on_a_cpu():
    import jax

    if jax.default_backend() != "cpu":
        pytest.skip("JAX_PLATFORMS selects another backend")
    assert jax.device_count() == 8


def test_numbers_have_32_bits_unless_a_test_asks_for_more():
    import jax.numpy as jnp

    assert jnp.asarray(1.0).dtype == jnp.float32


def test_the_x64_fixture_switches_64_bit_types_on(x64):
    import jax.numpy as jnp

    assert jnp.asarray(1.0).dtype == jnp.float64


def test_compiled_programs_are_kept_inside_the_checkout_or_where_the_user_says(tmp_path):
    program = "import tests.conftest, jax; jax.jit(lambda x: x + 1)(1.0)"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment, timeout=60, check=True)
    assert list(tmp_path.iterdir()), "the program was not kept"

    del environment["JAX_COMPILATION_CACHE_DIR"]
    program = "import os, tests.conftest; print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()) == REPOSITORY / ".cache" / "jax"


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_without_triton_its_test_is_reported_as_not_run_and_fails_in_ci(ci, outcome):
    # None in sys.modules makes a module look absent.
    program = "import sys, pytest; sys.modules['triton'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    target = str(Path(__file__).with_name("test_triton_ahead_of_time.py"))
    result = subprocess.run(
        [sys.executable, "-c", program, "-p", "no:cacheprovider", target],
        cwd=REPOSITORY,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome in result.stdout.splitlines()[-1]
    assert "scripts/setup --group aot" in result.stdout
    assert (result.returncode != 0) == bool(ci)
