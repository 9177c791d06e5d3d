"""The block pass over pages: golden rounds, an independent float64 forward, the dense form, poison and neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import draft_block, draft_context, draft_forward, draft_propose, params, program_text
from k3jax.cache import PAGE_SIZE
from k3jax.draft_params import abstract_draft
from k3jax.sharding.collectives import SINGLE
from tests.k3jax import draft_reference as reference
from tests.k3jax.draft_models import (
    KINDS,
    ROUNDS,
    draft_config,
    golden_draft,
    golden_rounds,
    golden_taps,
    random_draft,
    target_tables,
)
from tests.k3jax.golden_data import QUICK_COMPILE

PAGES_PER_ROW = 8
NUM_PAGES = 24
# Nothing, a page border, more than one block of 4 pages, and dead rows. Eight rows: bits are promised in buckets of
# whole tiles, because a CPU's matrix product treats the rows behind its last tile differently.
LENGTHS = (70, 33, 0, 300, 64, 256, 1, 17)
LIVE = (True, False, True, True, True, False, True, True)


def poisoned(config, dtype) -> draft_context.DraftPages:
    """A pool that is NaN everywhere, the null page too."""
    return jax.tree.map(
        lambda s: jnp.full(s.shape, jnp.nan, s.dtype), draft_context.page_shapes(config, NUM_PAGES, dtype)
    )


def page_table(lengths=LENGTHS, seed: int = 0) -> np.ndarray:
    """Pages for every row in random order; entries behind a row's pages point to pages of others."""
    order = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES))
    table = np.tile(order[-1:], (len(lengths), PAGES_PER_ROW))
    used = 0
    for row, length in enumerate(lengths):
        count = -(-length // PAGE_SIZE)
        table[row, :count] = order[used : used + count]
        used += count
    assert used < len(order)
    return table.astype(np.int32)


def store(values, config, pages, taps, table, lengths, live=LIVE):
    """Write every live row's context as one packed batch with padding behind it."""
    rows, positions = zip(*((r, p) for r, n in enumerate(lengths) if live[r] for p in range(n)), strict=True)
    rows, positions = np.array(rows), np.array(positions)
    packed = np.concatenate([taps[rows, positions], np.full((5, taps.shape[-1]), np.nan)])
    at = np.concatenate([positions, np.zeros(5, int)]).astype(np.int32)
    page = np.concatenate([table[rows, positions // PAGE_SIZE], np.full(5, 7)]).astype(np.int32)
    is_live = jnp.arange(len(at)) < len(rows)
    entries = draft_context.context_entries(values, jnp.asarray(packed), jnp.asarray(at), config)
    return draft_context.write_context(pages, entries, jnp.asarray(page), jnp.asarray(at % PAGE_SIZE), is_live)


@functools.cache
def dense_form(config):
    return jax.jit(functools.partial(_dense, config), compiler_options=QUICK_COMPILE)


def _dense(config, params, *args):
    return draft_forward.forward(params, config, *args)[:, 0]


@functools.cache
def hidden_of(config):
    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(params, embed, pages, anchors, positions, table, live):
        return draft_block.block_hidden(params, embed, config, pages, anchors, positions, table, live, SINGLE)

    return run


class Case:
    """A small draft with rows of LENGTHS, their contexts in poisoned pages."""

    def __init__(self, kind: str):
        rng = np.random.default_rng(5)
        self.config = draft_config(kind)
        self.numpy = random_draft(self.config)
        self.values = jax.tree.map(jnp.asarray, self.numpy)
        self.embed = target_tables(self.config)[0]
        width = len(self.config.taps) * self.config.target_hidden_size
        self.taps = rng.normal(0, 1, (len(LENGTHS), max(LENGTHS), width))
        self.anchors = rng.integers(0, self.config.vocab_size, len(LENGTHS)).astype(np.int32)
        self.table = page_table()
        pages = poisoned(self.config, jnp.float64)
        self.pages = store(self.values, self.config, pages, self.taps, self.table, LENGTHS)

    def hidden(self, *, order=None, live=LIVE, pages=None):
        """Blocks of the rows in `order`."""
        order = np.arange(len(LENGTHS)) if order is None else np.asarray(order)
        return hidden_of(self.config)(
            self.values,
            jnp.asarray(self.embed),
            self.pages if pages is None else pages,
            jnp.asarray(self.anchors[order]),
            jnp.asarray(np.asarray(LENGTHS, np.int32)[order]),
            jnp.asarray(self.table[order]),
            jnp.asarray(np.asarray(live)[order]),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_over_pages_equal_an_independent_forward(x64, kind):
    """D13: rotary scaling and epsilon are the configuration's."""
    case = Case(kind)
    found = np.asarray(case.hidden())
    for row in (0, 2, 4, 6):
        context = [reference.context_row(case.numpy, case.config, t) for t in case.taps[row, : LENGTHS[row]]]
        expected = reference.block_hidden(case.numpy, case.config, case.embed, context, case.anchors[row])
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-12)
        if case.config.attention == "mla":
            absorbed = reference.block_hidden(
                case.numpy, case.config, case.embed, context, case.anchors[row], absorbed=True
            )
            np.testing.assert_allclose(absorbed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_over_poisoned_pages_equal_the_dense_form(x64, kind):
    case = Case(kind)
    dense = dense_form(case.config)(
        case.values,
        jnp.asarray(case.embed),
        jnp.asarray(case.taps),
        jnp.asarray(case.anchors)[:, None],
        jnp.asarray(LENGTHS)[:, None],
    )
    expected = np.where(np.asarray(LIVE)[:, None, None], dense, 0)
    np.testing.assert_allclose(case.hidden(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gqa_window", "mla"])
def test_a_rows_block_is_the_same_bits_whatever_its_neighbours(x64, kind):
    case = Case(kind)
    together = np.asarray(case.hidden())
    order = [3, 4, 7, 0, 2, 1, 6, 5]
    np.testing.assert_array_equal(case.hidden(order=order), together[order])
    for row in (0, 2, 4):
        alone = np.arange(len(LENGTHS)) == row
        np.testing.assert_array_equal(case.hidden(live=alone)[row], together[row])


def test_what_a_window_leaves_out_is_not_read(x64):
    """Pages behind the window of the longest row may have been given away."""
    case = Case("gqa_window")
    window = case.config.sliding_window
    assert window is not None
    entries = np.array(case.pages.entries)
    row = LENGTHS.index(300)
    first_seen = (LENGTHS[row] - window + 1) // PAGE_SIZE
    for page in case.table[row, :first_seen]:
        entries[:, page] = 1e9
    changed = draft_context.DraftPages(jnp.asarray(entries))
    np.testing.assert_array_equal(case.hidden(pages=changed), case.hidden())


def test_padding_writes_zeros_to_the_null_page_and_nothing_elsewhere(x64):
    case = Case("gqa")
    entries = np.asarray(case.pages.entries)
    owned = {int(case.table[r, i]) for r, n in enumerate(LENGTHS) if LIVE[r] for i in range(-(-n // PAGE_SIZE))}
    for page in set(range(1, NUM_PAGES)) - owned:
        assert np.all(np.isnan(entries[:, page]))
    assert np.all(entries[:, 0, 0] == 0) and np.all(np.isnan(entries[:, 0, 1:]))
    last = case.table[0, 1]  # the row of 70 tokens has 6 in its second page
    assert np.all(np.isfinite(entries[:, last, :6])) and np.all(np.isnan(entries[:, last, 6:]))


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_context_is_written_in_place_and_blocks_copy_no_pool(kind):
    config, num_pages, tokens = draft_config(kind), 4099, 20
    pages = draft_context.page_shapes(config, num_pages, jnp.float32)
    tree = params.shapes(abstract_draft(config), jnp.float32)
    width = len(config.taps) * config.target_hidden_size

    def run(params, pages, embed, taps, numbers, table):
        entries = draft_context.context_entries(params, taps, numbers, config)
        pages = draft_context.write_context(pages, entries, numbers, numbers, numbers > 0)
        rows = numbers[: table.shape[0]]
        return pages, draft_block.block_hidden(params, embed, config, pages, rows, rows, table, rows > 0, SINGLE)

    shapes = (
        tree,
        pages,
        jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((3, PAGES_PER_ROW), jnp.int32),
    )
    compiled = jax.jit(run, donate_argnums=1).lower(*shapes).compile(QUICK_COMPILE)
    text = program_text.parse(str(compiled.as_text()))
    pool = program_text.ArrayType("f32", pages.entries.shape)
    assert program_text.pool_copies(text, [pool]) == []
    assert text.aliased_types() == {0: pool}
    used = compiled.memory_analysis()
    assert used is not None and used.temp_size_in_bytes < pages.entries.size * 4 // config.num_hidden_layers


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["gqa_window", "mla_tap_norm"])
def test_narrow_activations_stay_near_the_float64_block(kind, dtype):
    """The dtype of the weights is that of the result, and sums inside are wide."""
    with jax.enable_x64(True):
        case = Case(kind)
        expected = np.asarray(case.hidden())
    narrow = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), case.numpy)
    pages = store(narrow, case.config, poisoned(case.config, dtype), case.taps.astype(dtype), case.table, LENGTHS)
    found = hidden_of(case.config)(
        narrow,
        jnp.asarray(case.embed, dtype),
        pages,
        jnp.asarray(case.anchors),
        jnp.asarray(LENGTHS, jnp.int32),
        jnp.asarray(case.table),
        jnp.asarray(LIVE),
    )
    assert found.dtype == dtype and pages.entries.dtype == dtype
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if dtype == jnp.float32 else 3e-2), error


@pytest.mark.parametrize("name", ROUNDS)
def test_the_golden_rounds_come_out_of_pages(name):
    """D13: a block of 7 rows gives 7 drafts. The second round adds three tokens to the pages of the first."""
    config, values = golden_draft()
    golden, taps = golden_rounds(), golden_taps()
    table = page_table((ROUNDS[name],))
    pages = poisoned(config, jnp.float32)
    for start, end in ((0, 40), (40, 43))[: 1 if name == "round0" else 2]:
        at = jnp.arange(start, end)
        entries = draft_context.context_entries(values, jnp.asarray(taps[0, start:end]), at, config)
        pages = draft_context.write_context(
            pages, entries, jnp.asarray(table[0])[at // PAGE_SIZE], at % PAGE_SIZE, at >= 0
        )
    hidden = draft_block.block_hidden(
        values,
        jnp.asarray(golden["target.embed_tokens"]),
        config,
        pages,
        jnp.asarray(golden[f"{name}.block_ids"][:, 0]),
        jnp.asarray([ROUNDS[name]]),
        jnp.asarray(table),
        jnp.asarray([True]),
        SINGLE,
    )
    np.testing.assert_allclose(hidden, golden[f"{name}.hidden"], rtol=0, atol=2e-5)
    anchors = jnp.asarray(golden[f"{name}.block_ids"][:, 0])
    drafts = draft_propose.propose(
        values, jnp.asarray(golden["target.lm_head"]), config, hidden, anchors, config.block_size, SINGLE
    )
    np.testing.assert_array_equal(drafts.tokens, golden[f"{name}.draft_tokens"])
    np.testing.assert_allclose(drafts.logits, golden[f"{name}.corrected_logits"], rtol=0, atol=2e-5)
    survival = np.cumprod(1 / (1 + np.exp(-golden[f"{name}.confidence_logits"].astype(np.float64))), axis=1)
    np.testing.assert_allclose(drafts.survival, survival, rtol=3e-5, atol=0)
