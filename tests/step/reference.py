"""`model.forward` in float64, and how near a router tie a sequence comes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax import model, moe, params
from k3jax.config import K3Config


def whole_pass(config: K3Config, values: params.Tree, tokens: list[int]) -> tuple[np.ndarray, float]:
    """Log-probabilities [T, X] of one whole pass, and the smallest router margin in it."""
    k, select = config.num_experts_per_token, moe.select

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(values, token_ids):
        margins = []

        def observed(logits, bias, config):
            best = lax.top_k(jax.nn.sigmoid(logits) + bias, k + 1)[0]
            margins.append(jnp.min(best[:, k - 1] - best[:, k]))
            return select(logits, bias, config)

        with mock.patch.object(moe, "select", observed):
            logits = model.forward(values, config, token_ids)[0]
        return jax.nn.log_softmax(logits), jnp.min(jnp.stack(margins))

    with jax.enable_x64(True):
        drawn = dict(params.flatten(values))
        tree = params.abstract(config)
        wide = params.map_tree(lambda path, spec: np.asarray(drawn[path], spec.dtype(np.float64)), tree)
        logprobs, margin = jax.device_get(run(wide, np.asarray([tokens])))
    assert logprobs.dtype == np.float64
    return logprobs, float(margin)
