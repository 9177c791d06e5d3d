"""The models and machines of the step tests; each machine is made once and keeps its programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import loading, params, presets
from k3jax.config import K3Config
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import TINY8, random_params
from tests.step.driver import Machine

MIXED = StepShape(rows=8, prefill_tokens=320)
SMALL = StepShape(rows=4, prefill_tokens=64)
DECODE = StepShape(rows=4, prefill_tokens=0)
CUTS = (1, 2, 3, 4, 63, 64, 65, 127, 129)  # D03: of a prompt of 130 tokens


def hybrid4() -> K3Config:
    """Four layers, KDA KDA KDA MLA, dense then MoE, two depth blocks; every axis divides at tp 1, 2, 4 and 8."""
    return dataclasses.replace(
        presets.tiny_mesh(), num_hidden_layers=4, kda_layers=(0, 1, 2), mla_layers=(3,), attn_res_block_size=2
    )


@functools.cache
def tiny8_params() -> tuple[K3Config, params.Tree]:
    """The golden checkpoint."""
    config = K3Config.from_file(TINY8)
    return config, jax.device_get(loading.load_params(TINY8, config, jnp.float32))


@functools.cache
def tiny8() -> Machine:
    """The golden checkpoint in float32."""
    return Machine(*tiny8_params(), np.float32)


@functools.cache
def hybrid() -> Machine:
    """The four-layer model with random weights, in float64."""
    return Machine(hybrid4(), random_params(hybrid4()), np.float64, optimise=False)


@functools.cache
def mesh(tp: int, shard_latents: bool, whole_experts: bool) -> Machine:
    """Two layers, KDA with the dense block and MLA with experts, with random weights, in float64 on `tp` devices."""
    config = dataclasses.replace(
        presets.tiny_mesh(), num_hidden_layers=2, kda_layers=(0,), mla_layers=(1,), attn_res_block_size=1
    )
    return Machine(
        config,
        random_params(config),
        np.float64,
        tp=tp,
        optimise=False,
        shard_latents=shard_latents,
        whole_experts=whole_experts,
    )


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids, none of them 0."""
    return np.random.default_rng(seed).integers(1, 500, length).tolist()
