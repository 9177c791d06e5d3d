"""How many tokens verify steps would commit, from what the target wrote: no verification is run.

Drafts are accepted one after the other, and as long as they are, they are what the target wrote. So all that a verify
step does at an anchor follows from teacher-forced heads there. At temperature 0 draft k is accepted if it is the token
x_k that the target wrote. At temperature 1 rejection sampling draws d_k from q_k, keeps it with probability
min(1, p_k(d_k) / q_k(d_k)) and else draws from max(p_k - q_k, 0): what comes out is x_k by acceptance with probability
min(p_k(x_k), q_k(x_k)), by either way with p_k(x_k). Given that the target wrote x_k, the draft was accepted with
probability min(1, q_k(x_k) / p_k(x_k)). The chance of reaching an anchor and the expected number of steps follow
exactly, without drawing anything.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.draft_forward import Heads


def acceptance(
    heads: Heads,
    teacher_logits: Float[Array, "*B block X"],
    targets: Int[Array, "*B block"],
    temperature: float,
) -> Float[Array, "*B block"]:
    """Probability that each row's draft was accepted, given that those before it were and the target wrote `targets`.

    Wide. At temperature 0 the target's choice is what it wrote, whatever `teacher_logits` say.
    """
    if temperature == 0:
        return (jnp.argmax(heads.corrected, axis=-1) == targets).astype(heads.corrected.dtype)

    def log_chance(logits):
        log_all = jax.nn.log_softmax(logits / temperature, axis=-1)
        return jnp.take_along_axis(log_all, targets[..., None], axis=-1)[..., 0]

    return jnp.exp(jnp.minimum(log_chance(heads.corrected) - log_chance(teacher_logits), 0))


def expected_steps(accepted: Float[np.ndarray, "N block"], num_drafts: int) -> float:
    """Verify steps, in expectation, that write the N tokens behind the first of an answer of N + 1.

    `accepted[i]` are the acceptances of the block whose anchor is token i of the answer. Every step commits its
    accepted drafts, at most `num_drafts`, and one token of the target's; what lies behind the end commits nothing.
    """
    count = len(accepted)
    steps = np.zeros(count + num_drafts + 2)  # still to come from anchor i on; 0 behind the last
    for anchor in reversed(range(count)):
        reach = np.cumprod(accepted[anchor, :num_drafts])  # that at least k + 1 drafts are accepted
        exactly = np.append(1.0, reach) - np.append(reach, 0.0)
        steps[anchor] = 1 + exactly @ steps[anchor + 1 : anchor + 2 + num_drafts]
    return float(steps[0])
