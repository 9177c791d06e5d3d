"""The experts' Triton kernels: interpreted against float64, compiled for Hopper and Blackwell, lowered by jax-triton.

What needs Triton runs in programs of its own beside this file; its caches stay in the repository's.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import moe, presets
from k3jax.pallas import expert_cases
from k3jax.triton_kernels import expert_float8_cases, experts

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SHARED_LIMIT = 227 * 1024
TENSOR_MEMORY_COLUMNS = 512
FEW_CASES = ("a slice of the experts, padding", "nothing here", "skewed, ragged")
FEW_SHAPES = ("tp8:9", "whole:8192")
ALL_SHAPES = tuple(f"{share}:{tokens}" for share in ("tp8", "whole") for tokens in (1, 1024, 2048, 8192))
BETAS = {"beta": presets.k3().situ_beta, "linear_beta": presets.k3().situ_linear_beta}


def lines_of(program: str, *arguments: str) -> list[dict]:
    """The JSON lines a program prints."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(REPOSITORY / ".cache" / "triton"),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(HERE / program), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_cases_pass(rows: int, *names: str) -> None:
    lines = lines_of("experts_interpreted.py", str(rows), *names)
    assert len(lines) >= 2 * len(names) > 0 or not names
    assert [line for line in lines if not line["passed"]] == []


@pytest.mark.aot
def test_interpreted_kernels_equal_float64_in_both_modes(require_triton):
    """Expert offset, padding, layers of a stack, no rows, ragged tails; unwritten rows are NaN before (D07, D08)."""
    assert_cases_pass(16, *FEW_CASES)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32])
def test_every_case_passes_in_the_interpreter(rows, require_triton):
    assert_cases_pass(rows)


def assert_compiles_to(compute_capability: int, activations: str, instruction: str, shapes) -> None:
    """Every launch uses this instruction alone, asynchronous copies, and no more than a multiprocessor has."""
    lines = lines_of("experts_compiled.py", str(compute_capability), *(f"{shape}:{activations}" for shape in shapes))
    assert len(lines) == 2 * len(shapes)
    for line in lines:
        assert line["instructions"], line
        assert all(instruction in found for found in line["instructions"]), line
        assert line["has_async_copies"], line
        assert line["stack"] == 0, line  # where spilled registers go
        assert line["shared"] <= SHARED_LIMIT and line["tensor_memory"] <= TENSOR_MEMORY_COLUMNS, line


COMPILATIONS = [
    pytest.param(90, "bfloat16", "f32.bf16.bf16", id="Hopper"),
    pytest.param(103, "bfloat16", "kind::f16", id="Blackwell"),
    pytest.param(103, "float8", "kind::mxf8f6f4.block_scale", id="Blackwell, block-scaled"),
]


@pytest.mark.aot
@pytest.mark.parametrize(("compute_capability", "activations", "instruction"), COMPILATIONS)
def test_kernels_at_full_size_compile_to_the_tensor_cores_own_instruction(
    compute_capability, activations, instruction, require_triton
):
    assert_compiles_to(compute_capability, activations, instruction, FEW_SHAPES)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("compute_capability", "activations", "instruction"), COMPILATIONS)
def test_kernels_with_every_number_of_rows_compile(compute_capability, activations, instruction, require_triton):
    assert_compiles_to(compute_capability, activations, instruction, ALL_SHAPES)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("compute_capability", "activations"),
    [pytest.param("90", "bfloat16", marks=pytest.mark.slow), ("103", "float8")],
)
def test_jax_triton_lowers_two_layers_with_one_build_of_each_kernel(compute_capability, activations, require_triton):
    *kernels, total = lines_of("experts_lowered.py", compute_capability, activations)
    assert total["custom_calls"] == 4
    assert [line["kernel"] for line in kernels] == ["gated_kernel", "plain_kernel"]
    for line in kernels:
        assert line["target"] == f"sm_{compute_capability}a"
        assert line["has_block_scale"] == (activations == "float8")
        assert line["alignments"] == [16] * line["num_parameters"]


@pytest.mark.parametrize("tile", [1, 16])
def test_tiles_cover_every_live_row_once_and_no_other(tile):
    rng = np.random.default_rng()
    chosen = rng.integers(-2, 7, (11, 3)).astype(np.int32)
    visits = experts.make_visits(jnp.asarray(chosen), 5, tile)
    tokens, place = np.asarray(visits.tokens), np.asarray(visits.place)
    expert_of, owners = {}, []
    for expert, first, live in np.asarray(visits.tiles).T:
        assert 0 <= live <= tile and 0 <= expert < 5
        owners += [first + i for i in range(live)]
        expert_of |= {first + i: expert for i in range(live)}
    is_here = (chosen >= 0) & (chosen < 5)
    assert sorted(owners) == sorted(place[is_here].tolist()) == list(range(is_here.sum()))
    assert np.all(place[~is_here] == -1)
    for token, rank in zip(*np.nonzero(is_here), strict=True):
        row = place[token, rank]
        assert (expert_of[row], tokens[row]) == (chosen[token, rank], token)


def test_the_package_imports_where_triton_is_absent():
    program = "\n".join(
        [
            "import sys",
            "sys.modules.update(dict.fromkeys(('triton', 'jax_triton')))",
            "from k3jax.triton_kernels import experts",
            "assert experts.tiles_for(144, 896).rows == 16",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("pairs", "rows"), [(16, 16), (16 * 1024, 32), (16 * 8192, 128), (16 * 131072, 128)])
def test_tiles_have_about_the_mean_number_of_rows_of_an_expert(pairs, rows):
    assert experts.tiles_for(pairs, 896).rows == rows


@pytest.mark.parametrize("change", [{"rows": 24}, {"features": 64}, {"num_warps": 3}, {"num_stages": 0}])
def test_bad_tiles_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        experts.TritonTiles(**{"rows": 16, **change})


def test_unsupported_situations_are_refused_with_their_reason(monkeypatch):
    monkeypatch.setattr(experts, "_missing_package", lambda: None)
    supported: Any = experts.supported
    good: dict[str, Any] = {
        "config": presets.k3(),
        "dtype": jnp.bfloat16,
        "platform": "gpu",
        "compute_capability": 10.3,
        "inner": 384,
        "activations": "float8",
    }
    assert supported(**good) is None
    assert supported(**good | {"compute_capability": 9.0, "activations": "bfloat16"}) is None
    for change, word in (
        ({"platform": "cpu"}, "need a GPU"),
        ({"compute_capability": 12.0}, "12.0"),
        ({"compute_capability": 8.9}, "8.9"),
        ({"compute_capability": 9.0}, "block-scaled"),
        ({"dtype": jnp.float32}, "float32"),
        ({"inner": 192}, "192"),
        ({"is_mxfp4": False}, "MXFP4"),
        ({"config": dataclasses.replace(presets.k3(), routed_expert_hidden_size=3616)}, "3616"),
    ):
        reason = supported(**good | change)
        assert reason is not None and word in reason
    monkeypatch.setattr(experts, "_missing_package", lambda: "triton is not installed")
    assert supported(**good) == "triton is not installed"


def test_the_judge_of_float8_accepts_its_own_rounding_and_refuses_two_percent():
    inputs = expert_cases.draw(expert_cases.ExpertCase(name="x", tokens=20, k=2, experts=3), np.random.default_rng())
    place = np.arange(40).reshape(20, 2)
    exact = expert_float8_cases.expert_outputs(inputs, **BETAS, is_quantised=True).reshape(40, -1)
    rows = exact.astype(expert_cases.BF16)

    def passed(rows: np.ndarray, place: np.ndarray = place) -> bool:
        return expert_float8_cases.judge(inputs, rows, place, **BETAS).passed

    assert passed(rows)
    assert not passed(rows.astype(np.float64) * 1.02)
    assert not passed(np.roll(rows, 1, axis=0))
    assert not passed(rows, np.where(place == 1, 0, place))
    unquantised = expert_float8_cases.expert_outputs(inputs, **BETAS, is_quantised=False).reshape(40, -1)
    assert not passed(unquantised), "the two oracles are told apart"


def test_quantised_activations_cost_under_five_and_a_half_percent_of_an_experts_output():
    """The figure that documentation states: 4.7 %."""
    case = expert_cases.ExpertCase(name="x", tokens=64, k=1, experts=1, latent=512, inner=256)
    inputs = expert_cases.draw(case, np.random.default_rng())
    got, exact = (expert_float8_cases.expert_outputs(inputs, **BETAS, is_quantised=q) for q in (True, False))
    assert 0.040 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.055


def test_experts_say_themselves_which_layer_of_a_stack_is_meant():
    """As the serving step hands them over: the launches get the stack and the index, or a layer that stands alone."""
    shapes = (3, 4, 2, 128, 64), (3, 4, 128, 64), (3, 4, 2, 128, 4), (3, 4, 128, 4)
    stacks = [jnp.zeros(shape, jnp.uint8) for shape in shapes]
    routing = moe.Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))

    def launched(weights: moe.Experts, layer: int | None = None) -> list[tuple]:
        found = []

        def record(launch):
            found.append((launch.inputs["weights_ptr"].shape, launch.inputs["layer_ptr"].tolist()))
            return {name: jnp.zeros(x.shape, x.dtype) for name, x in launch.outputs.items() if x is not None}

        z = jnp.zeros((2, 128), jnp.bfloat16)
        experts.routed_expert_rows(z, routing, weights, presets.k3(), layer=layer, run=record)
        return found

    def given(form, layer: int | None = None) -> moe.Experts:
        w13, w2, w13_scale, w2_scale = map(form, stacks)
        return moe.Experts(w13, w2, w13_scale, w2_scale, layer)

    stacked = [(shapes[0], [2]), (shapes[1], [2])]
    assert launched(given(lambda x: x, layer=2)) == stacked
    assert launched(given(lambda x: x), layer=2) == stacked
    apart = [(shapes[0][1:], [0]), (shapes[1][1:], [0])]
    assert launched(given(lambda x: x[2])) == apart
    assert launched(given(tuple, layer=2)) == apart
