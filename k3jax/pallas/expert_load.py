"""Expert weights into the form that the grouped GEMM kernels read, once, between loading and the first step.

The abstract tree changes with the arrays, so that shapes, shardings and the names of stored programs follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from k3jax.pallas import expert_repack
from k3jax.params import ParamSpec, Tree
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.rules import partition_spec

REPACK: dict[str, Callable] = {  # by parameter, of one layer or of all
    "w13_packed": expert_repack.repack_w13,
    "w2_packed": expert_repack.repack_w2,
    "w13_scale": expert_repack.repack_w13_scale,
    "w2_scale": expert_repack.repack_w2_scale,
}
# Axes behind layers and experts: feature pairs, blocks of inputs, tiles of a pair, rows, and words of a row.
_AXES = {
    "w13_packed": ("expert_ffn", None, None, None, None),
    "w2_packed": (None, "expert_ffn", None, None, None),
    "w13_scale": ("expert_ffn", None, None, None),
    "w2_scale": (None, "expert_ffn", None, None),
}


def repacked_tree(tree: Tree) -> Tree:
    """The abstract parameters with the experts as the kernels read them. The tree is one of MXFP4 experts."""
    return tree | {"moe": tree["moe"] | {name: _spec(name, tree["moe"][name]) for name in REPACK}}


def _spec(name: str, spec: ParamSpec) -> ParamSpec:
    shape = jax.eval_shape(REPACK[name], jax.ShapeDtypeStruct(spec.shape, spec.dtype(None))).shape
    kind = "words32" if name.endswith("scale") else "words16"
    return dataclasses.replace(spec, shape=shape, axes=(*spec.axes[:2], *_AXES[name]), kind=kind)


def repack(tree: Tree, weights: Any, mesh: Mesh, parallel: Parallel) -> Any:
    """Loaded stacks, which are consumed one after the other, in the form of `repacked_tree(tree)`.

    Raises `ValueError` for a scale above 2, which has no form there.
    """
    loaded = dict(weights["moe"])
    for name in ("w13_scale", "w2_scale"):
        if not bool(jax.jit(expert_repack.scales_fit)(loaded[name])):
            raise ValueError(
                f"{name} holds a scale byte above {expert_repack.MAX_SCALE_BYTE} (a scale above 2), which the expert "
                "kernels cannot hold. Use --kernels xla."
            )
    repacked = repacked_tree(tree)["moe"]
    for name, run in REPACK.items():
        specs = [partition_spec(specs[name].axes, parallel) for specs in (tree["moe"], repacked)]
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        old = loaded.pop(name)
        loaded[name] = jax.block_until_ready(jax.jit(mapped, out_shardings=NamedSharding(mesh, specs[1]))(old))
        old.delete()
    return weights | {"moe": loaded}
