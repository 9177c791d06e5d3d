"""Drafts once more, in NumPy float64 and token by token, from the description of the published models alone.

Positions are complex numbers, attention is a loop over queries and heads, and MLA comes in two forms: `expanded` makes
every head's keys and values, `absorbed` moves W_kvb to the query and to the result.
"""

import math

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    weights = np.exp(x - np.max(x))
    return weights / weights.sum()


def frequencies(rope, width):
    """YaRN by parts: dimensions that turn often are kept, those that turn less than once are slowed by the factor."""
    result = []
    for i in range(width // 2):
        fast = rope.theta ** (-2 * i / width)
        if rope.yarn is None:
            result.append(fast)
            continue
        bounds = []
        for turns in (rope.yarn.beta_fast, rope.yarn.beta_slow):
            wavelength = rope.yarn.original_max_position_embeddings / turns / (2 * math.pi)
            bounds.append(width * math.log(wavelength) / (2 * math.log(rope.theta)))
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), width - 1)
        slowed = min(max((i - low) / (high - low), 0), 1)
        result.append((1 - slowed) * fast + slowed * fast / rope.yarn.factor)
    return np.array(result)


def yarn_growth(rope):
    return 1.0 if rope.yarn is None else 0.1 * math.log(rope.yarn.factor) + 1


def turn(x, position, config):
    """Rotate the last axis as complex numbers; Hugging Face's YaRN lengthens them, DeepSeek's does not."""
    turned = np.exp(1j * position * frequencies(config.rope, x.shape[-1]))
    if config.attention == "gqa":  # halves
        half = x.shape[-1] // 2
        z = (x[..., :half] + 1j * x[..., half:]) * turned * yarn_growth(config.rope)
        return np.concatenate([z.real, z.imag], axis=-1)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turned
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def context_row(params, config, taps):
    """Projected taps [N x D] of one token."""
    if config.tap_norm:
        parts = np.split(taps, len(config.taps))
        norms = params["context"]["tap_norm"]
        taps = np.concatenate([norm(p, w, config.rms_norm_eps) for p, w in zip(parts, norms, strict=True)])
    return norm(params["context"]["proj"] @ taps, params["context"]["norm"], config.rms_norm_eps)


def stored(weights, config, x, position):
    """What a layer keeps of a token: (keys, values) per KV head, or (latent, rotated shared key)."""
    if config.attention == "gqa":
        k, v = ((w @ x).reshape(config.num_key_value_heads, config.head_dim) for w in weights["kv"])
        return turn(norm(k, weights["k_norm"], config.rms_norm_eps), position, config), v
    both = weights["kv_a"] @ x
    latent = norm(both[: config.kv_lora_rank], weights["kv_a_norm"], config.rms_norm_eps)
    return latent, turn(both[config.kv_lora_rank :], position, config)


def query_heads(weights, config, x, position):
    if config.attention == "gqa":
        q = (weights["q"] @ x).reshape(config.num_attention_heads, config.head_dim)
        return turn(norm(q, weights["q_norm"], config.rms_norm_eps), position, config)
    q = weights["q_b"] @ norm(weights["q_a"] @ x, weights["q_a_norm"], config.rms_norm_eps)
    q = q.reshape(config.num_attention_heads, -1)
    nope = config.qk_nope_head_dim
    return np.concatenate([q[:, :nope], turn(q[:, nope:], position, config)], axis=1)


def attend(weights, config, q, seen, absorbed):
    """Heads' values, one behind the other, of one query over a list of stored tokens."""
    out = []
    scale = config.head_dim**-0.5
    if config.attention == "mla":
        scale *= yarn_growth(config.rope) ** 2
        kv_b = weights["kv_b"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    for head in range(config.num_attention_heads):
        if config.attention == "gqa":
            group = head * config.num_key_value_heads // config.num_attention_heads
            keys = np.array([k[group] for k, _ in seen])
            values = np.array([v[group] for _, v in seen])
            out.append(softmax(keys @ q[head] * scale) @ values)
            continue
        nope = config.qk_nope_head_dim
        up_key, up_value = kv_b[head, :nope], kv_b[head, nope:]
        latents = np.array([latent for latent, _ in seen])
        shared = np.array([key for _, key in seen])
        if absorbed:
            scores = latents @ (up_key.T @ q[head, :nope]) + shared @ q[head, nope:]
            out.append(up_value @ (softmax(scores * scale) @ latents))
        else:
            keys = np.concatenate([latents @ up_key.T, shared], axis=1)
            out.append(softmax(keys @ q[head] * scale) @ (latents @ up_value.T))
    return np.concatenate(out)


def block_hidden(params, config, embed, context, anchor, absorbed=False):
    """Hidden rows [block, D] of a block behind the context rows of all earlier tokens [p, D]."""
    start = len(context)
    ids = [anchor] + [config.mask_token_id] * (config.block_size - 1)
    x = np.array([embed[i] for i in ids])
    for layer in range(config.num_hidden_layers):
        weights = {name: stack[layer] for group in ("block", "attention") for name, stack in params[group].items()}
        normed = norm(x, weights["attn_norm"], config.rms_norm_eps)
        tokens = [stored(weights, config, row, at) for at, row in enumerate(context)]
        tokens += [stored(weights, config, row, start + i) for i, row in enumerate(normed)]
        mixed = []
        for i in range(len(ids)):
            at = start + i
            visible = [
                token
                for key, token in enumerate(tokens)
                if (key <= at or not config.causal)
                and (config.sliding_window is None or at - key < config.sliding_window)
            ]
            mixed.append(attend(weights, config, query_heads(weights, config, normed[i], at), visible, absorbed))
        x = x + np.array(mixed) @ weights["out"].T
        normed = norm(x, weights["ffn_norm"], config.rms_norm_eps)
        gate, up = (normed @ w.T for w in weights["gate_up"])
        x = x + (silu(gate) * up) @ weights["down"].T
    return norm(x, params["norm"], config.rms_norm_eps)


def propose(params, config, lm_head, hidden, anchor, count):
    """Greedy drafts, corrected logits and survival of the first `count` rows."""
    tokens, logits, survival = [], [], []
    previous, alive = anchor, 1.0
    for h in hidden[:count]:
        low_rank = params["markov"]["previous"][previous]
        logits.append(lm_head @ h + params["markov"]["next"] @ low_rank)
        if config.has_confidence:
            inputs = np.concatenate([h, low_rank]) if config.confidence_reads_markov else h
            raw = params["confidence"]["weight"] @ inputs + params["confidence"]["bias"][0]
            alive *= 1 / (1 + np.exp(-raw))
        survival.append(alive)
        previous = int(np.argmax(logits[-1]))
        tokens.append(previous)
    return np.array(tokens), np.array(logits), np.array(survival)
