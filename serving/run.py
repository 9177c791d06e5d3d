"""`python -m serving.run`: parse the flags, listen at once, build the engine beside it, serve until told to stop.

Exit status: 0 after a shutdown, 2 when the configuration, the port or the model is at fault (one line says what).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3jax.chat import ChatLiterals
from k3jax.draft_fields import DraftError
from serving.api.app import build_app
from serving.api.state import Backend, ServerState
from serving.config import NO_DRAFT, ConfigError, ServeConfig
from serving.flags import parse_config
from serving.garbage import collect_rarely
from serving.server import DrainingServer
from serving.welcome import log_configuration, log_ready

logger = logging.getLogger("serving")

Build = Callable[..., tuple[Any, Any, Any]]


def main(arguments: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run a server and return the exit status. `build` replaces `serving.launch.build_engine`."""
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments, os.environ)
        check_model_folder(config)
        check_draft_folder(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = listen(config)
    except OSError as error:
        reason = error.strerror or str(error)
        print(
            f"error: cannot listen on --host {config.host} --port {config.port}: {reason}. Choose another --port.",
            file=sys.stderr,
        )
        return 2
    log_configuration(config, listener.getsockname()[1])
    return serve(config, listener, build)


def check_model_folder(config: ServeConfig) -> None:
    """Catch a wrong path before anything starts; the loader checks the content.

    Raises:
        ConfigError: the folder is missing or holds no config.json.
    """
    if config.model == "demo":
        return
    folder = Path(config.model)
    if not folder.is_dir():
        raise ConfigError(f"--model={config.model!r} is no folder. Give `demo` or the folder of a checkpoint.")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model={config.model!r} has no config.json. Give the folder of a whole checkpoint.")


def check_draft_folder(config: ServeConfig) -> None:
    """Catch a wrong path before anything starts; the loader checks the content.

    Raises:
        ConfigError: the folder is missing or holds no config.json.
    """
    if not config.wants_draft:
        return
    given, folder = f"--draft={config.draft!r}", Path(str(config.draft))
    word = str(config.draft).lower()
    if word == "demo":  # no folder is meant, though a checkout has one of this name
        raise ConfigError(
            f"{given} is no folder of a draft. The demo's own comes with --model demo: leave out --draft."
        )
    try:
        is_file, is_folder, has_config = folder.is_file(), folder.is_dir(), (folder / "config.json").is_file()
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}. Give the folder of a DSpark draft.") from None
    if is_file:
        raise ConfigError(f"{given} is a file. Give the folder that it lies in: --draft={str(folder.parent)!r}.")
    if not is_folder:
        none = f"Write `{NO_DRAFT}` to draft nothing, or give" if word == NO_DRAFT else f"Use `{NO_DRAFT}`, or give"
        raise ConfigError(f"{given} is no folder. {none} the folder of a DSpark draft.")
    if not has_config:
        raise ConfigError(f"{given} has no config.json. Give the folder of a whole DSpark draft.")


def listen(config: ServeConfig) -> socket.socket:
    """Bind and listen, so that a taken port is known before minutes of loading.

    Raises:
        OSError: the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a restarted server have its port back at once; a port that somebody listens on is still refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def serve(config: ServeConfig, listener: socket.socket, build: Build | None = None) -> int:
    """Serve until a signal comes or the engine cannot be built."""
    state = ServerState(config)
    server = DrainingServer(build_app(state), state)
    builder = threading.Thread(
        target=_build, args=(state, server, listener.getsockname()[1], build), name="build", daemon=True
    )
    server.run_with(listener, on_start=builder.start)
    if builder.is_alive():
        # Stopped while it still loads or compiles. That cannot be interrupted, and an interpreter that shuts down
        # under a compiler crashes; nothing is open that needs closing.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0)
    return 2 if server.build_failed else 0


def _build(state: ServerState, server: DrainingServer, port: int, build: Build | None) -> None:
    """Build the engine; on failure say why in one line and stop the server."""
    try:
        if build is None:
            from serving.launch import build_engine  # imports jax, which takes seconds
        else:
            build_engine = build
        engine, tokenizer, literals = build_engine(state.config, progress=state.report_progress)
        if build is None:
            collect_rarely()
        state.attach(Backend(engine=engine, tokenizer=tokenizer, literals=literals or ChatLiterals()))
    except Exception as error:
        logger.debug("The engine could not be built.", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.error("Cannot serve%s: %s", _culprit(error, reason, state.config), reason)
        state.fail(reason)
        server.stop_after_failed_build()
        return
    log_ready(state, port)


def _culprit(error: Exception, reason: str, config: ServeConfig) -> str:
    """The flag that named what cannot be served, unless the reason begins with one itself.

    The demo's own draft comes with `--model demo`.
    """
    if reason.startswith("--"):
        return ""
    if isinstance(error, DraftError) and config.wants_draft:
        return f" --draft {config.draft}"
    return f" --model {config.model}"


if __name__ == "__main__":
    sys.exit(main())
