"""Compiling the serving step: its programs, their operands' shardings, and fresh device state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import cache, draft_state, draft_step, page_tables, params, sampling, step, step_outputs, token_counts
from k3jax.config import K3Config
from k3jax.draft_state import Drafting
from k3jax.pallas.dispatch import Ops
from k3jax.sharding import rules
from k3jax.sharding.collectives import Parallel
from k3jax.step import MixedBatch, StepExtras
from k3jax.step_inputs import MIN_TILES, StepShape, packed_size

REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """Everything that decides the compiled step except its bucket."""

    config: K3Config
    cache_shape: cache.CacheShape
    tree: Any  # abstract parameters
    dtype: Any
    mesh: Mesh
    parallel: Parallel
    ops: Ops = Ops()
    mixed_batch: MixedBatch = "zero-copy"
    drafting: Drafting | None = None  # a draft model, whose parameters are `tree["draft"]`
    unstacked: bool = False  # the target's parameters as per-layer arrays, which XLA:CPU needs to use them in place

    def param_specs(self) -> Any:
        """PartitionSpecs in the form the step takes parameters in."""
        specs = rules.param_specs(self.tree, self.parallel)
        if not self.unstacked:
            return specs
        return params.map_tree(
            lambda path, spec: (
                (PartitionSpec(*spec[1:]),) * self._spec(path).shape[0] if self._is_unstacked(path) else spec
            ),
            specs,
        )

    def shape_of(self, *, rows: int, prefill_tokens: int) -> StepShape:
        """A bucket of this program."""
        drafts = self.drafting.tokens if self.drafting else 0
        return StepShape(rows=rows, prefill_tokens=prefill_tokens, drafts=drafts, min_tile=self.min_tile)

    @property
    def platform(self) -> str:
        """Of the devices: "cpu" or "gpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def min_tile(self) -> int:
        """Of all its buckets."""
        return MIN_TILES[self.platform]

    def pool_shapes(self) -> cache.Pools:
        """Abstract pools, unsharded."""
        return draft_state.pool_shapes(self.config, self.cache_shape, self.dtype, self.drafting)

    def pool_specs(self) -> cache.Pools:
        """Their partition."""
        return draft_state.pool_specs(self.parallel, self.drafting)

    def row_shapes(self) -> cache.Rows:
        """Abstract row state, unsharded."""
        return draft_state.row_shapes(self.config, self.cache_shape, self.dtype, self.drafting)

    def row_specs(self) -> cache.Rows:
        """Its partition."""
        return draft_state.row_specs(self.parallel, self.drafting)

    def _is_unstacked(self, path: tuple[str, ...]) -> bool:
        return path[0] != "draft" and params.is_stacked(self._spec(path))

    def _spec(self, path: tuple[str, ...]) -> params.ParamSpec:
        return functools.reduce(lambda node, name: node[name], path, self.tree)

    def prepare(self, tree: Any) -> Any:
        """Loaded (stacked) parameters in the form the step takes; consumes them."""
        if not self.unstacked:
            return tree
        placed = self._placed(self._param_shapes(), self.param_specs())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
        # In a program, because taking a divided array apart outside one gathers it on a single device.
        return jax.jit(self._unstack, out_shardings=shardings)(tree)

    def _unstack(self, tree: Any) -> Any:
        target = {name: group for name, group in tree.items() if name != "draft"}
        return tree | params.unstack(target, {name: self.tree[name] for name in target})

    def function(self, shape: StepShape):
        """The step as a jitted function of (params, pools, rows, packed, extras); pools and rows are donated."""
        in_specs = (
            self.param_specs(),
            self.pool_specs(),
            self.row_specs(),
            REPLICATED,
            StepExtras(REPLICATED, REPLICATED, REPLICATED),
        )
        shared = {"config": self.config, "shape": shape, "ops": self.ops, "parallel": self.parallel}
        if self.drafting is None:
            body = functools.partial(step.step, mixed_batch=self.mixed_batch, **shared)
            outputs = step.StepOutputs(*(REPLICATED,) * len(step.StepOutputs._fields))
        else:
            body = functools.partial(draft_step.step, drafting=self.drafting, **shared)
            outputs = draft_step.VerifyOutputs(*(REPLICATED,) * len(draft_step.VerifyOutputs._fields))
        out_specs = (in_specs[1], in_specs[2], outputs)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=(1, 2))

    def count_cached(self) -> jax.stages.Compiled:
        """The program of `token_counts.count_cached`: (rows, piece) to rows, rows donated."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = jax.ShapeDtypeStruct((token_counts.PIECE,), jnp.int32)
        piece = token_counts.CachedTokens(number, number, number, number, tokens)
        return self._row_program(functools.partial(token_counts.count_cached, parallel=self.parallel), piece)

    def put_cached_pages(self) -> jax.stages.Compiled:
        """The program of `page_tables.put_cached`: (rows, piece) to rows, rows donated."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        pages = jax.ShapeDtypeStruct((page_tables.PIECE,), jnp.int32)
        return self._row_program(page_tables.put_cached, page_tables.CachedPages(number, number, number, pages))

    def _row_program(self, body: Any, piece: Any) -> jax.stages.Compiled:
        row_specs, piece_specs = self.row_specs(), jax.tree.map(lambda _: REPLICATED, piece)
        specs = (row_specs, piece_specs)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=row_specs, check_vma=False)
        rows = self._placed(self.row_shapes(), row_specs)
        return jax.jit(mapped, donate_argnums=0).lower(rows, self._placed(piece, piece_specs)).compile()

    def output_fields(self, shape: StepShape) -> step_outputs.Outputs:
        """What `step_outputs.unpack` makes of the vector that a compiled bucket returns."""
        return step_outputs.layout(shape, self.config, self.dtype, self.drafting)

    def compile(self, shape: StepShape) -> jax.stages.Compiled:
        """Compile one bucket ahead of time."""
        return self.lower(shape).compile()

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        """Lower a bucket for the server: (params, pools, rows, packed, extras, place) to pools, rows and a vector.

        Unlike those of `function` its outputs are one vector, see `output_fields`. On a GPU they take the place of
        `place`, an earlier step's: each kernel that names something that has moved costs the host an update of the
        command buffer. Elsewhere `place` is ().
        """
        function, fields, size = self.function(shape), self.output_fields(shape), self.vector_size(shape)
        params, pools, rows, _, extras = self.operands(shape)
        vector = self._placed(jax.ShapeDtypeStruct((size,), jnp.int32), REPLICATED)

        def packed_step(params, pools, rows, packed, extras, place):
            pools, rows, outputs = function(params, pools, rows, packed, extras)
            found = step_outputs.pack(outputs, fields, size)
            if self.keeps_outputs_in_place:
                found = step_outputs.in_place_of(place, found, never=rows.length[0] < 0)
            return pools, rows, found

        place = vector if self.keeps_outputs_in_place else ()
        return jax.jit(packed_step, donate_argnums=(1, 2, 5)).lower(params, pools, rows, vector, extras, place)

    @property
    def keeps_outputs_in_place(self) -> bool:
        """Whether compiled buckets take a `place`."""
        return self.platform == "gpu"

    def vector_size(self, shape: StepShape) -> int:
        """Length of a compiled bucket's vector of inputs, and of that of its outputs."""
        return max(packed_size(shape), step_outputs.packed_size(self.output_fields(shape)))

    def operands(self, shape: StepShape) -> tuple:
        """Abstract operands of a bucket, with shardings."""
        vocab_words = -(-self.config.vocab_size // 32)
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        extras = StepExtras(
            jax.ShapeDtypeStruct((shape.rows, cache.MAX_LOGIT_BIAS), jnp.int32),
            jax.ShapeDtypeStruct((shape.rows, cache.MAX_LOGIT_BIAS), jnp.float32),
            jax.ShapeDtypeStruct((shape.rows, vocab_words), jnp.uint32),
        )
        return (
            self._placed(self._param_shapes(), self.param_specs()),
            self._placed(self.pool_shapes(), self.pool_specs()),
            self._placed(self.row_shapes(), self.row_specs()),
            self._placed(packed, REPLICATED),
            self._placed(extras, StepExtras(REPLICATED, REPLICATED, REPLICATED)),
        )

    def _param_shapes(self) -> Any:
        shapes = params.shapes(self.tree, self.dtype)
        if not self.unstacked:
            return shapes
        return params.map_tree(
            lambda path, leaf: (
                (jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),) * leaf.shape[0]
                if self._is_unstacked(path)
                else leaf
            ),
            shapes,
        )

    def _placed(self, shapes, specs):
        def place(shape, spec):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(place, shapes, specs)

    def fresh_state(self) -> tuple[cache.Pools, cache.Rows]:
        """Empty pools and rows on the devices."""
        _, pools, rows, _, _ = self.operands(self.shape_of(rows=1, prefill_tokens=0))

        def zeros():
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (pools, rows))

        shardings = jax.tree.map(lambda s: s.sharding, (pools, rows))
        fresh_pools, fresh_rows = jax.jit(zeros, out_shardings=shardings)()
        return fresh_pools, fresh_rows._replace(bias_ids=fresh_rows.bias_ids - 1)

    def neutral_extras(self, shape: StepShape) -> StepExtras:
        """Extras of a step that uses none of the features, on the devices."""
        extras = StepExtras(
            jnp.full((shape.rows, cache.MAX_LOGIT_BIAS), -1, jnp.int32),
            jnp.zeros((shape.rows, cache.MAX_LOGIT_BIAS), jnp.float32),
            sampling.full_mask(shape.rows, self.config.vocab_size),
        )
        return jax.device_put(extras, NamedSharding(self.mesh, REPLICATED))
