"""Kimi K3's message format: render conversations to ids, parse generated ids back. No jax, no I/O after loading."""

from k3jax.chat.literals import ChatLiterals, load_chat_literals
from k3jax.chat.parse import ChatDelta, ChatParser, ToolCallDelta
from k3jax.chat.render import ChatError, render_chat

__all__ = [
    "ChatDelta",
    "ChatError",
    "ChatLiterals",
    "ChatParser",
    "ToolCallDelta",
    "load_chat_literals",
    "render_chat",
]
