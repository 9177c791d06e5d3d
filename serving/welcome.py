"""What the log says at start-up: the resolved configuration, then how to talk to the server."""

from __future__ import annotations

import logging

from serving.api.info import chosen_values, version
from serving.api.state import ServerState
from serving.config import ServeConfig

logger = logging.getLogger("serving")


def log_configuration(config: ServeConfig, port: int) -> None:
    """Log every setting, as given."""
    settings = " ".join(f"{name}={value}" for name, value in config.public().items() if value is not None)
    logger.info("k3jax %s: %s", version(), settings)
    logger.info("Listening on %s, /ready answers 200 when the model is up.", _url(config.host, port))


def log_ready(state: ServerState, port: int) -> None:
    """Log what was chosen automatically and a request to copy."""
    effective = " ".join(f"{name}={value}" for name, value in chosen_values(state).items())
    logger.info("In effect: %s", effective)
    logger.info("Ready. Try:\n%s", example(state.config, port))


def example(config: ServeConfig, port: int) -> str:
    """Return a curl command and three lines of Python that work as they are."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)  # a client needs one address
    url, name = f"{_url(host, port)}/v1", config.served_name
    key = "$K3JAX_API_KEY" if config.api_key is not None else ""
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    python_key = 'os.environ["K3JAX_API_KEY"]' if key else '"none"'
    question = "What is the capital of Norway?"
    return "\n".join(
        (
            f"  curl {url}/chat/completions{header} -H 'Content-Type: application/json' \\",
            f'    -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "{question}"}}]}}\'',
            f"  {'import os; ' if key else ''}from openai import OpenAI",
            f'  client = OpenAI(base_url="{url}", api_key={python_key})',
            f'  print(client.chat.completions.create(model="{name}", '
            f'messages=[{{"role": "user", "content": "{question}"}}]).choices[0].message.content)',
        )
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
