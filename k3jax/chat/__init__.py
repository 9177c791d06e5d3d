"""Kimi K3's message format: render conversations to ids, parse generated ids back. No jax, no I/O after loading."""

from k3jax.chat.events import ChatDelta, ChatSummary, ParsedToolCall, ToolCallDelta
from k3jax.chat.history import ChatError
from k3jax.chat.literals import OWN_LITERALS, ChatLiterals, LiteralsError, load_chat_literals, write_chat_literals
from k3jax.chat.parse import ChatParser
from k3jax.chat.render import THINKING_EFFORTS, render_chat

__all__ = [
    "OWN_LITERALS",
    "THINKING_EFFORTS",
    "ChatDelta",
    "ChatError",
    "ChatLiterals",
    "ChatParser",
    "ChatSummary",
    "LiteralsError",
    "ParsedToolCall",
    "ToolCallDelta",
    "load_chat_literals",
    "render_chat",
    "write_chat_literals",
]
