"""k3jax: Kimi K3 in JAX. `load` is the front door; the model is `k3jax.model`, its blocks `k3jax.kda`, `mla`, `moe`."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Model": "k3jax.api",
    "load": "k3jax.api",
    "K3": "k3jax.modules",
    "K3Config": "k3jax.config",
    "ConfigError": "k3jax.config",
    "LoadError": "k3jax.checkpoint_reader",
}
__all__ = ["K3", "ConfigError", "K3Config", "LoadError", "Model", "load"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
