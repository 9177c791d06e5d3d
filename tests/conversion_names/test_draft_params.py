"""Names and shapes of drafts: the published totals, and every tensor consumed."""

import json
import math

import numpy as np
import pytest

from k3jax import loading, params
from k3jax.checkpoint_reader import LoadError, open_checkpoint
from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig
from k3jax.draft_params import abstract_draft, for_checkpoint, num_parameters, plain_name
from k3jax.folder_config import find_problems, read_folder
from tests.conversion_names.draft_data import COPIES, PUBLISHED, TORCHSPEC, changed, tiny, write_draft
from tests.k3jax.golden_data import DATA


def sources(tree):
    return [source for _, spec in params.flatten(tree) for source in spec.sources()]


@pytest.mark.parametrize(
    ("form", "tensors", "parameters"),
    [("specforge", 62, 2_249_289_601), ("speculators", 64, 4_744_900_481)],
)
def test_published_drafts_have_their_known_totals(form, tensors, parameters):
    tree = abstract_draft(DraftConfig.from_hf(PUBLISHED[form]), COPIES[form])
    assert (len(sources(tree)), num_parameters(tree)) == (tensors, parameters)


def test_the_mla_draft_has_its_known_bytes_with_and_without_the_embedding():
    config = DraftConfig.from_hf(TORCHSPEC)
    with_copy = abstract_draft(config, COPIES["torchspec"])
    assert len(sources(with_copy)) == 68
    assert 2 * num_parameters(abstract_draft(config)) == 4_775_815_682
    assert 2 * num_parameters(with_copy) == 4_775_815_682 + 2 * 163_840 * 7168


def test_the_golden_draft_has_exactly_the_names_of_its_configuration():
    stored = json.loads((DATA / "dspark_gqa_tiny" / "tensors.json").read_text())
    tree = abstract_draft(DraftConfig.from_file(DATA / "dspark_gqa_tiny"))
    assert {source.name: list(source.shape) for source in sources(tree)} == stored
    assert len(stored) == 40


@pytest.mark.parametrize("form", PUBLISHED)
def test_the_sources_of_a_stack_fill_it_exactly_once(form):
    config = DraftConfig.from_hf(changed(tiny(form), fc_norm=True))
    for path, spec in params.flatten(abstract_draft(config, COPIES[form])):
        hits = np.zeros(spec.shape, np.int8)
        for source in spec.sources():
            assert hits[source.index].size == math.prod(source.shape), path
            hits[source.index] += 1
        assert np.all(hits == 1), path


def test_norms_of_taps_have_one_tensor_each():
    config = DraftConfig.from_hf(changed(TORCHSPEC, fc_norm=True))
    names = [source.name for source in sources(abstract_draft(config)) if source.name.startswith("fc_norm")]
    assert names == [f"fc_norm.{i}.weight" for i in range(5)]


@pytest.mark.parametrize("prefix", ["", "model.", "logit_head."])
@pytest.mark.parametrize("form", PUBLISHED)
def test_every_tensor_of_an_export_is_consumed(tmp_path, form, prefix):
    folder = write_draft(tmp_path, form, prefix=prefix)
    checkpoint = open_checkpoint(folder)
    found = read_folder(folder)
    assert find_problems(checkpoint, found) == {}
    assert {source.name for source in sources(found.tree(checkpoint))} == checkpoint.tensors.keys()


def test_an_unknown_a_missing_and_a_wrong_tensor_are_named_together(tmp_path):
    """D49: an engine that drops names it does not know drafts with random weights."""
    folder = write_draft(tmp_path, "torchspec")
    checkpoint = open_checkpoint(folder)
    checkpoint.tensors["layers.0.self_attn.gate.weight"] = checkpoint.tensors.pop("layers.1.mlp.up_proj.weight")
    checkpoint.tensors["final_norm.weight"] = checkpoint.tensors["layers.0.self_attn.kv_b_proj.weight"]
    with pytest.raises(LoadError) as error:
        loading.check(checkpoint, read_folder(folder).tree(checkpoint))
    assert error.value.problems == {
        "missing tensors": ["layers.1.mlp.up_proj.weight"],
        "unknown tensors": ["layers.0.self_attn.gate.weight"],
        "wrong shapes": ["final_norm.weight is [256, 32], expected [128]"],
    }


def test_two_tensors_of_one_meaning_are_refused():
    config = DraftConfig.from_hf(TORCHSPEC)
    with pytest.raises(ConfigError, match=r"final_norm.weight.*model.final_norm.weight"):
        for_checkpoint(config, ["final_norm.weight", "model.final_norm.weight"])


def test_prefixes_of_exports_are_taken_off():
    assert plain_name("model.logit_head.markov_head.markov_w1.weight") == "markov_head.markov_w1.weight"
    assert plain_name("layers.0.model.weight") == "layers.0.model.weight"
