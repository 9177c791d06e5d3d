"""The server for K3: `python -m serving.run` over HTTP, `serving.LLM` from Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    # On first use: `import serving.core` must not pull in tokenizers.
    if name == "LLM":
        from serving.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
