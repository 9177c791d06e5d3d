"""`load` and the object it returns: logits and generation from a model folder, in three lines.

Meant for research and scripts; the server drives the same step with continuous batching.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from k3jax import generate as generation
from k3jax import model, moe
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.config import K3Config
from k3jax.loading import Progress, compute_dtype, expert_format, fill, is_skipped
from k3jax.params import ExpertFormat, Tree, abstract
from k3jax.sharding.collectives import SINGLE, Parallel
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.sharding.rules import param_specs
from k3jax.tokenizer import Tokenizer, load_tokenizer

MIN_BUCKET = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A loaded model: configuration, parameters on their devices, tokenizer if the folder has one."""

    config: K3Config
    params: Tree
    tokenizer: Tokenizer | None
    dtype: jnp.dtype
    experts: ExpertFormat
    mesh: Mesh | None = None
    parallel: Parallel = SINGLE
    skipped: tuple[str, ...] = ()  # tensors of the folder that a text model does not use

    def logits(self, token_ids: Any) -> Float[Array, "*B T X"]:
        """Logits of every position, float32, for ids [T] or [B, T].

        Lengths are padded to powers of two from 64 on and every padded shape is compiled once. Raises `ValueError` for
        ids that are no integers of the vocabulary.
        """
        ids = check_ids(token_ids, self.config)
        batch = ids.reshape(-1, ids.shape[-1])
        padding = bucket(ids.shape[-1]) - ids.shape[-1]
        padded = np.pad(batch, ((0, 0), (0, padding)), constant_values=self.config.pad_token_id)
        program = _logits_program(self.config, self.experts, self.mesh, self.parallel)
        out = program(self.params, jnp.asarray(padded))
        return out[:, : ids.shape[-1]].reshape(*ids.shape, out.shape[-1])

    def generate(
        self,
        token_ids: Any,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token_ids: Collection[int] | None = None,
    ) -> generation.Generation:
        """Continue one sequence of ids [T] by at most `max_tokens` tokens, greedily at temperature 0.

        Ends after the first of `stop_token_ids` (default: the configuration's end token; pass () for none), which is
        the last of the new tokens then. Raises `ValueError` for arguments that cannot be served.
        """
        ids = check_ids(token_ids, self.config)
        if ids.ndim != 1:
            raise ValueError(f"token_ids has shape {ids.shape}; generate continues one sequence [T] at a time")
        room = self.config.max_position_embeddings - len(ids)
        if not 1 <= max_tokens <= room:
            raise ValueError(f"max_tokens={max_tokens} does not fit: pass 1 to {room} behind {len(ids)} tokens")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature} must be a number from 0 on")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} must lie in [0, 2^64)")
        stops = {self.config.eos_token_id} if stop_token_ids is None else set(stop_token_ids)
        return generation.generate(
            self._step_setup,
            self._step_params,
            ids.tolist(),
            max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=stops,
        )

    @functools.cached_property
    def _step_setup(self) -> generation.StepSetup:
        mesh = make_mesh(1) if self.mesh is None else self.mesh
        return generation.StepSetup(
            config=self.config, experts=self.experts, dtype=self.dtype, mesh=mesh, parallel=parallel_of(mesh)
        )

    @functools.cached_property
    def _step_params(self) -> Tree:
        """On a CPU a second copy, layer by layer; elsewhere the stacks themselves."""
        return self._step_setup.program(1).prepare(self.params)


def load(
    path: str | Path,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Model:
    """Load a Hugging Face model folder.

    `dtype` is "float32", "bfloat16", "float64" or "auto" (float32 on a CPU, else bfloat16). `mesh` comes from
    `k3jax.sharding.mesh.make_mesh`. Raises `ConfigError` for the configuration, `LoadError` with every fault of the
    tensor files, `TokenizerError` for the tokenizer's.
    """
    folder = Path(path)
    compute = compute_dtype(dtype)
    config = K3Config.from_file(folder)
    parallel = SINGLE if mesh is None else parallel_of(mesh)
    checkpoint = open_checkpoint(folder)
    return Model(
        config=config,
        params=fill(checkpoint, config, compute, mesh, parallel, progress=progress),
        tokenizer=load_tokenizer(folder) if (folder / "tiktoken.model").is_file() else None,
        dtype=compute,
        experts=expert_format(checkpoint),
        mesh=mesh,
        parallel=parallel,
        skipped=tuple(sorted(filter(is_skipped, checkpoint.tensors))),
    )


def bucket(length: int) -> int:
    """The padded length of a sequence: a power of two, at least 64."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def check_ids(token_ids: Any, config: K3Config) -> np.ndarray:
    """Token ids as int32 [T] or [B, T]. Raises `ValueError`."""
    try:
        ids = np.asarray(token_ids)
    except ValueError:
        raise ValueError("token_ids must be [T] or [B, T]: rows of different lengths need one call each") from None
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise ValueError(f"token_ids has shape {ids.shape}; pass [T] or [B, T] with at least one token")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids has dtype {ids.dtype}; pass integers")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)][0]
        raise ValueError(f"token id {wrong} is outside the vocabulary of {config.vocab_size}")
    if ids.shape[-1] > config.max_position_embeddings:
        raise ValueError(
            f"{ids.shape[-1]} tokens exceed max_position_embeddings={config.max_position_embeddings}; pass fewer"
        )
    return ids.astype(np.int32)


@functools.lru_cache(maxsize=16)
def _logits_program(config: K3Config, experts: ExpertFormat, mesh: Mesh | None, parallel: Parallel) -> Callable:
    def run(params, token_ids):
        # The serving expert loop: no copy of expert weights per tile, and nobody differentiates this.
        out = model.forward(params, config, token_ids, parallel=parallel, run_experts=moe.routed_experts)
        return out.astype(jnp.float32)

    if mesh is not None:
        specs = param_specs(abstract(config, experts), parallel)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=PartitionSpec(None, None, parallel.axes),
            check_vma=False,
        )
    return jax.jit(run)
