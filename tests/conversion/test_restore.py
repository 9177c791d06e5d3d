"""Orbax folders load like the Hugging Face folders they came from: on every mesh, with plain Orbax, in the server."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import k3jax
from k3jax import convert, loading, params, presets
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.config import K3Config
from k3jax.sharding.mesh import make_mesh, parallel_of
from serving import launch
from serving.config import ServeConfig
from serving.fake_executor import FakeExecutor
from tests.conftest import REPOSITORY
from tests.conversion.conversion_data import EXPERTS, MODEL, mini
from tests.k3jax.golden_data import TINY8, random_tensors, write_checkpoint

DEMO = REPOSITORY / "demo"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a name to (source, Orbax folder); each is converted once."""
    made, place = {}, tmp_path_factory.mktemp("restore")

    def get(name: str):
        if name not in made:
            if name == "mesh":
                config = presets.tiny_mesh()
                source = write_checkpoint(place / name, config, random_tensors(config), 4)
            elif name == "mini":
                source = mini(place / name)
            else:
                source = {"tiny8": TINY8, "demo": DEMO}[name]
            target = place / f"{name}-orbax"
            # Small chunks: several per tensor, cut where no rank's share ends.
            convert.to_orbax(source, target, convert.Options(chunk_bytes=3000, experts_per_unit=5))
            made[name] = source, target
        return made[name]

    return get


def assert_same(got: params.Tree, expected: params.Tree) -> None:
    """Equal in bits and equally divided."""
    expected_leaves = dict(params.flatten(expected))
    for path, leaf in params.flatten(got):
        other = expected_leaves.pop(path)
        assert leaf.sharding == other.sharding and leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=".".join(path))
    assert not expected_leaves


@pytest.mark.parametrize(
    ("name", "tp", "dcp", "whole_experts", "shard_latents"),
    [
        ("mesh", 1, 1, False, False),
        ("mesh", 8, 1, False, True),
        ("mesh", 2, 2, True, False),
        ("tiny8", 4, 1, True, True),
        ("demo", 2, 1, False, False),
        pytest.param("mesh", 2, 1, False, True, marks=slow),
        pytest.param("mesh", 4, 1, True, True, marks=slow),
        pytest.param("mesh", 4, 2, False, False, marks=slow),
        pytest.param("tiny8", 1, 1, False, False, marks=slow),
        pytest.param("tiny8", 2, 1, True, True, marks=slow),
        pytest.param("demo", 1, 1, False, False, marks=slow),
        pytest.param("demo", 4, 1, False, True, marks=slow),
        pytest.param("demo", 8, 1, True, False, marks=slow),
    ],
)
def test_restoring_onto_a_mesh_equals_the_direct_load(folders, name, tp, dcp, whole_experts, shard_latents):
    source, orbax = folders(name)
    config = K3Config.from_file(orbax)
    mesh = make_mesh(tp, dcp)
    parallel = parallel_of(mesh, shard_latents=shard_latents, whole_experts=whole_experts)
    direct = loading.fill(open_checkpoint(source), config, jnp.bfloat16, mesh, parallel)
    # In small pieces too, which are many programs to compile, so once.
    for size in [loading.MAX_PIECE_BYTES] + [20_000] * (whole_experts and name == "mesh"):
        tree = loading.fill(open_checkpoint(orbax), config, jnp.bfloat16, mesh, parallel, max_piece_bytes=size)
        assert_same(tree, direct)


def test_load_takes_an_orbax_folder(folders):
    source, orbax = folders("mini")
    model, direct = k3jax.load(orbax), k3jax.load(source)
    assert_same(model.params, direct.params)
    assert model.config == direct.config and model.experts == direct.experts


def test_a_rank_reads_only_the_blocks_it_needs(folders, monkeypatch):
    """Rows of a sharded tensor that lie in other blocks are never touched."""
    _, orbax = folders("mesh")
    checkpoint = open_checkpoint(orbax)
    name = MODEL + "embed_tokens.weight"
    tensor = checkpoint.tensors[name]
    read: list[str] = []
    real = np.memmap

    def counting(file, *arguments, **keywords):
        read.append(str(file))
        return real(file, *arguments, **keywords)

    monkeypatch.setattr(np, "memmap", counting)
    checkpoint.read(name, (slice(0, tensor.block_rows),))
    assert read == [str(tensor.blocks[0])]
    first, last = tensor.block_rows, 3 * tensor.block_rows
    checkpoint.read(name, (slice(first, last), slice(0, 1)))
    assert read[1:] == [str(path) for path in tensor.blocks[1:3]]


# --- plain Orbax ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_plain_orbax_restores_a_unit_onto_some_of_the_devices(folders, num_devices):
    """D52: written by a process with eight devices."""
    source, orbax = folders("mini")
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    with ocp.PyTreeCheckpointer() as checkpointer:
        unit = orbax / "layers/00001/experts-0000-0004"
        tree = checkpointer.metadata(unit).item_metadata.tree
        arguments = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding), tree)
        restored = checkpointer.restore(unit, restore_args=arguments)
    direct = open_checkpoint(source)
    assert set(restored) == {f"{EXPERTS}w{n}.weight_{kind}" for n in (1, 2, 3) for kind in ("packed", "scale")}
    for name, array in restored.items():
        assert array.sharding == sharding and array.dtype == jnp.uint8
        for expert in range(5):
            np.testing.assert_array_equal(array[expert], direct.read(name.replace("experts.", f"experts.{expert}.")))


def test_plain_orbax_restores_a_unit_as_numpy(folders):
    """D52."""
    source, orbax = folders("mini")
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(orbax / "layers/00000/dense-part")
    direct = open_checkpoint(source)
    names = {name for name in direct.tensors if ".layers.0." in name}
    assert restored.keys() == names
    for name in names:
        assert isinstance(restored[name], np.ndarray)
        np.testing.assert_array_equal(restored[name], direct.read(name))
        assert restored[name].dtype == direct.read(name).dtype


def test_metadata_can_be_read_with_one_device(folders):
    """D52: no device, mesh or handler of the writer is needed."""
    _, orbax = folders("mini")
    program = (
        "import sys, json, jax, orbax.checkpoint as ocp\n"
        "tree = ocp.PyTreeCheckpointer().metadata(sys.argv[1]).item_metadata.tree\n"
        "print(json.dumps([jax.device_count(), {k: [list(v.shape), str(v.dtype)] for k, v in tree.items()}]))\n"
    )
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(orbax / "layers/00000/dense-part")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    num_devices, found = json.loads(result.stdout)
    assert num_devices == 1
    assert found[MODEL + "layers.0.self_attn.A_log"] == [[2], "float32"]
    assert found[MODEL + "layers.0.self_attn.q_proj.weight"] == [[32, 32], "bfloat16"]


# --- the server -------------------------------------------------------------------------------------------------------
def test_the_server_builds_its_engine_from_an_orbax_folder(folders, monkeypatch):
    """Configuration, tokenizer and weights come from the folder; programs are not compiled here."""
    source, orbax = folders("demo")
    built = []

    class Captured(FakeExecutor):
        def __init__(self, program, weights, limits, **rest):
            super().__init__(limits)
            built.append(weights)

    monkeypatch.setattr("serving.executor_build.DeviceExecutor", Captured)
    engine, tokenizer, literals = launch.build_engine(ServeConfig(model=str(orbax), max_num_seqs=2, num_pages=4))
    engine.shutdown(0.0)
    assert tokenizer is not None and literals is not None
    stored = open_checkpoint(source)
    np.testing.assert_array_equal(built[0]["embed"], stored.read(MODEL + "embed_tokens.weight").astype(np.float32))
    last = K3Config.from_file(source).num_experts - 1
    name = f"{EXPERTS}{last}.w2.weight_packed"
    np.testing.assert_array_equal(built[0]["moe"]["w2_packed"][0, last], stored.read(name))
