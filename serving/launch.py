"""From a `ServeConfig` to a running engine: devices, weights, pool sizes, programs.

Importing it is cheap: the device side is `executor_build`, which imports jax.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable
from typing import Any, cast

from k3jax.chat import ChatLiterals, LiteralsError, load_chat_literals
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig, length_warning
from k3jax.tokenizer import Tokenizer, load_tokenizer
from serving.config import ConfigError, ServeConfig, flag_name
from serving.core.policy import BLOCK, Checkpoint, SchedulerPolicy, TokenBudget
from serving.core.scheduler import Scheduler
from serving.core.types import ExecutorLimits
from serving.engine import Engine

logger = logging.getLogger(__name__)
DEMO_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "demo"
DEMO_DRAFT_FOLDER = DEMO_FOLDER / "draft"
Progress = Callable[[str], None]


def model_folder(config: ServeConfig) -> pathlib.Path:
    """Where the checkpoint is. Raises `ConfigError` when the demo's weights are not there."""
    if config.model != "demo":
        return pathlib.Path(config.model)
    if not (DEMO_FOLDER / "config.json").is_file():
        raise ConfigError(
            f"--model demo needs the weights in {DEMO_FOLDER}, which this installation lacks. "
            "Run from a checkout of the repository, or give the folder of a checkpoint."
        )
    return DEMO_FOLDER


def draft_folder(config: ServeConfig) -> pathlib.Path | None:
    """Where the draft is; the demo's own unless the settings say otherwise. None: nothing drafts.

    Raises `ConfigError` when settings need the demo's own draft and it is not there.
    """
    if config.wants_draft:
        return pathlib.Path(str(config.draft))
    if config.draft is None and config.model == "demo" and config.draft_exclusion is not None:
        logger.info("the demo's draft is not used beside %s", config.draft_exclusion)
    if not config.may_take_own_draft:
        return None
    if (DEMO_DRAFT_FOLDER / "config.json").is_file():
        return DEMO_DRAFT_FOLDER
    missing = f"the demo's own draft is missing: there is no {DEMO_DRAFT_FOLDER / 'config.json'}"
    if needing := config.needs_draft:
        raise ConfigError(
            f"{' and '.join(map(config.shown, needing))} cannot be used, for {missing}. Run from a whole checkout of "
            f"the repository, give the folder of a draft with --draft, or leave out {config.flags_of(needing)}."
        )
    logger.warning("%s. Serving without a draft, as --draft none would without this warning.", missing)
    return None


def warn_of_short_draft(draft: pathlib.Path | None, limits: ExecutorLimits) -> None:
    """Say it where requests may become longer than the draft was made for."""
    warning = draft and length_warning(DraftConfig.from_file(draft), limits.max_model_len)
    if warning:
        logger.warning("draft %s: %s. Use a draft for longer contexts, or a smaller --max-model-len.", draft, warning)


def build_engine(
    config: ServeConfig, progress: Progress | None = None
) -> tuple[Engine, Tokenizer | None, ChatLiterals | None]:
    """A started engine with every program compiled, its tokenizer and its prompt literals (None where absent).

    Raises `ConfigError`, `LoadError` or `ValueError` with one line that says what cannot work.
    """
    report = progress or (lambda message: None)
    policy = scheduler_policy(config)
    folder = model_folder(config)
    model_config = K3Config.from_file(folder)
    tokenizer = load_tokenizer(folder) if (folder / "tiktoken.model").is_file() else None
    if config.load_format == "fake":
        executor = _fake_executor(config, model_config, tokenizer)
        check_effects(config, executor.limits)
    else:
        from serving.executor_build import build_executor, prepare_environment

        prepare_environment(config)

        def check(limits: ExecutorLimits) -> None:
            check_effects(config, limits)
            Scheduler(limits, policy=policy)
            warn_of_short_draft(draft, limits)

        draft = draft_folder(config)
        executor = build_executor(config, model_config, folder, draft, report, check)
    engine = Engine(
        executor, max_waiting=config.max_waiting or None, seed=config.seed, policy=policy, overlap=config.overlap
    )
    engine.start()
    return engine, tokenizer, _literals(folder)


def scheduler_policy(config: ServeConfig) -> SchedulerPolicy:
    """The scheduler's part of the settings."""
    return SchedulerPolicy(
        prefix_cache=config.prefix_cache,
        checkpoint=cast(Checkpoint, config.checkpoint),
        checkpoint_stride=config.checkpoint_stride,
        checkpoint_every=config.checkpoint_every,
        token_budget=cast(TokenBudget, config.token_budget),
        reserve_draft_slots=config.reserve_draft_slots,
        adaptive_verification=config.adaptive_verification is not False,
    )


def check_effects(config: ServeConfig, limits: ExecutorLimits) -> None:
    """Refuse settings that, on this device, could not have any effect. Raises `ConfigError`."""
    longest = (limits.max_model_len - 1) // BLOCK * BLOCK
    for name in ("checkpoint_stride", "checkpoint_every"):
        value = getattr(config, name)
        if value > max(longest, BLOCK):
            raise ConfigError(
                f"{flag_name(name)}={value} has no effect: prompts have at most {limits.max_model_len - 1} tokens. "
                f"Use at most {max(longest, BLOCK)}."
            )
    needed = limits.page_bytes + limits.slot_bytes
    if config.offload == "host" and config.host_cache_gb > 0 and limits.host_cache_bytes < needed:
        least = math.ceil(needed / 1e5) / 1e4
        raise ConfigError(
            f"--host-cache-gb={config.host_cache_gb} has no effect: one page and the state behind it take {needed} "
            f"bytes. Give at least {least}, or leave it out."
        )


def _literals(folder: pathlib.Path) -> ChatLiterals | None:
    try:
        return load_chat_literals(folder)
    except LiteralsError as error:
        logger.warning("No prompt literals: %s. Requests that need one are refused.", error)
        return None


def _fake_executor(config: ServeConfig, model_config: K3Config, tokenizer: Tokenizer | None) -> Any:
    from serving.fake_executor import DEFAULT_LIMITS, FakeExecutor

    given = {
        "num_rows": config.max_num_seqs,
        "num_slots": config.num_slots or (config.max_num_seqs + 1 if config.max_num_seqs else None),
        "num_pages": config.num_pages,
        "max_step_tokens": config.max_step_tokens,
        "host_cache_bytes": config.host_cache_bytes,
        "max_model_len": config.max_model_len,
        "vocab_size": tokenizer.vocab_size if tokenizer else model_config.vocab_size,
    }
    return FakeExecutor(limits=dataclasses.replace(DEFAULT_LIMITS, **{k: v for k, v in given.items() if v is not None}))
