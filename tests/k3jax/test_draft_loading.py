"""Draft folders: every published form loads into the same tree, and what does not fit the target is refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax import params
from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig
from k3jax.draft_fields import DraftError
from k3jax.draft_loading import load_draft, open_draft
from k3jax.draft_params import abstract_draft
from k3jax.draft_sharding import place
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_shardings
from tests.conversion_names.draft_data import COPIES, PUBLISHED, draft_tensors, tiny, write_draft
from tests.k3jax.draft_models import DRAFT_TINY, golden_draft
from tests.k3jax.golden_data import mini_config

TARGET = mini_config(
    vocab_size=512, hidden_size=128, num_hidden_layers=8, kda_layers=(0, 1, 2, 4, 5, 6), mla_layers=(3, 7)
)


def test_the_golden_draft_loads():
    config, expected = golden_draft()
    folder = open_draft(DRAFT_TINY, TARGET)
    assert folder.config == config
    found = load_draft(folder, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("prefix", ["", "model.", "logit_head."])
@pytest.mark.parametrize("form", PUBLISHED)
def test_every_form_loads_whatever_stands_before_its_names(tmp_path, form, prefix):
    folder = open_draft(write_draft(tmp_path, form, prefix=prefix), TARGET)
    loaded = load_draft(folder, jnp.bfloat16)
    stored = draft_tensors(folder.config, COPIES[form])
    assert "copies" not in loaded
    used = set()
    for path, spec in params.flatten(folder.tree):
        array = np.asarray(dict(params.flatten(loaded))[path])
        for source in spec.sources():
            plain = source.name.removeprefix(prefix)
            np.testing.assert_array_equal(array[source.index], stored[plain].reshape(array[source.index].shape))
            used.add(plain)
    assert used == stored.keys() - set(COPIES[form])


def test_a_copy_of_another_shape_is_refused(tmp_path):
    path = write_draft(tmp_path, "torchspec") / "model.safetensors"
    tensors = load_file(path)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:-1]
    save_file(tensors, path)
    with pytest.raises(DraftError, match=r"embed_tokens.weight is \[511, 128\], expected \[512, 128\]"):
        open_draft(tmp_path, TARGET)


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path):
    """D49."""
    path = write_draft(tmp_path, "specforge") / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.self_attn.gate.weight"] = tensors.pop("layers.1.mlp.up_proj.weight")
    save_file(tensors, path)
    with pytest.raises(DraftError) as error:
        open_draft(tmp_path, TARGET)
    assert error.value.problems == {
        "missing tensors": ["layers.1.mlp.up_proj.weight"],
        "unknown tensors": ["layers.0.self_attn.gate.weight"],
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 500}, "its vocab_size is 512, the target's 500"),
        ({"hidden_size": 64}, "its hidden_size is 128, the target's 64"),
        (
            {"num_hidden_layers": 5, "kda_layers": (0, 1, 2, 3), "mla_layers": (4,)},
            r"it taps layers \[6\], the target's last is 4",
        ),
    ],
)
def test_a_draft_for_another_target_is_refused_before_its_tensors_are_looked_at(tmp_path, changes, reason):
    (tmp_path / "config.json").write_text(json.dumps(tiny("speculators")))
    fields = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 8, "kda_layers": TARGET.kda_layers}
    target = mini_config(**(fields | {"mla_layers": TARGET.mla_layers} | changes))
    with pytest.raises(ConfigError, match=reason):
        open_draft(tmp_path, target)


def test_a_folder_of_another_model_is_no_draft(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TARGET.to_hf()))
    with pytest.raises(ConfigError, match="this is not a draft"):
        open_draft(tmp_path, TARGET)


@pytest.mark.parametrize("form", ["specforge", "torchspec"])
def test_a_draft_loads_into_its_shards(tmp_path, form):
    """Eight ranks: 8 heads and the widths divide, 4 KV heads do not."""
    folder = open_draft(write_draft(tmp_path, form), TARGET)
    mesh = make_mesh(8)
    parallel = parallel_of(mesh)
    whole, divided = load_draft(folder, jnp.float32), load_draft(folder, jnp.float32, mesh)
    jax.tree.map(np.testing.assert_array_equal, divided, whole)
    placed = param_shardings(place(folder.tree, folder.config, parallel), mesh, parallel)
    same = jax.tree.map(lambda array, wanted: array.sharding.is_equivalent_to(wanted, array.ndim), divided, placed)
    assert all(jax.tree.leaves(same))
    attention = divided["attention"]
    if form == "specforge":
        assert attention["kv"].sharding.is_fully_replicated
        assert attention["q"].addressable_shards[0].data.shape == (2, 16, 128)
    else:
        assert attention["kv_b"].addressable_shards[0].data.shape == (2, 32, 32)
    assert divided["markov"]["previous"].addressable_shards[0].data.shape == (64, 16)


def test_a_vocabulary_that_does_not_divide_is_refused(tmp_path):
    folder = open_draft(write_draft(tmp_path, "specforge"), TARGET)
    with pytest.raises(ConfigError, match="degree 3 does not divide the draft's vocabulary of 512"):
        load_draft(folder, jnp.float32, make_mesh(3))


def test_published_configurations_find_their_heads_and_widths_divided_or_whole():
    parallel = parallel_of(make_mesh(8))
    for raw in PUBLISHED.values():
        config = DraftConfig.from_hf(raw)
        placed = place(abstract_draft(config), config, parallel)
        divided = {path[-1] for path, spec in params.flatten(placed) if {"heads", "ffn", "vocab"} & set(spec.axes)}
        attention = {"q", "kv", "out"} if config.attention == "gqa" else {"q_b", "kv_b", "out"}
        assert divided == attention | {"gate_up", "down", "previous", "next"}
