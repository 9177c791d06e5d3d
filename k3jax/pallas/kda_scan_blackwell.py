"""What of `kda_scan` is another on Blackwell: its products, whose left operands cannot come out of registers.

The rounded state and the pseudo values, which Hopper's state side keeps in registers and also leaves in shared memory
for the output side, are read from there by both sides. So the state side has to wait for the outputs of the tile before
until it may round its state, where on Hopper its first product already runs. It has never run on a Blackwell GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import blackwell_products
from k3jax.pallas.kda_prefill_memory import CHUNK, COLUMN, WGMMA, WIDTH, by_column, half_of, meet

_HALVES = half_of(0), half_of(1)


def scratch() -> dict:
    """Products by name: S W^T and P keys of the state side, outputs of the other."""
    return blackwell_products.scratch(reading=CHUNK, update=WIDTH, outputs=CHUNK)


def advance(state: tuple, s: dict, stage, wait_taken, hand_over) -> tuple:
    """State after a tile, as `kda_scan.advance`."""
    wait_taken()
    for half, columns in zip(state, _HALVES, strict=True):
        s["rounded"].at[:, columns][...] = half.astype(jnp.bfloat16)
    meet()
    blackwell_products.begin(s["reading"], (s["rounded"], s["w"].at[stage].T))
    wanted = plgpu.load(s["values"].at[stage], layout=WGMMA).astype(jnp.float32)
    s["pseudo"][...] = (wanted - blackwell_products.finish(s["reading"])).astype(jnp.bfloat16)
    meet()
    blackwell_products.begin(s["update"], (s["pseudo"], s["keys"].at[stage]))
    kept = [plgpu.load(s["decay"].at[stage, columns], layout=COLUMN) for columns in _HALVES]
    hand_over()  # after the last ordinary reads of the stage: it orders them before the copy that overwrites
    added = blackwell_products.finish(s["update"])
    sums = added[:, :CHUNK], added[:, CHUNK:]
    return tuple(half * by_column(decay) + more for half, decay, more in zip(state, kept, sums, strict=True))


def outputs(s: dict, stage) -> jax.Array:
    """A tile's outputs, [C, 64 of V], as `kda_scan.outputs`."""
    of_state = s["queries"].at[stage], s["rounded"].T
    of_tile = s["scores"].at[stage], s["pseudo"].T
    return blackwell_products.multiply(s["outputs"], of_state, of_tile).astype(jnp.bfloat16)
