"""The device side of a launch: settings left open get their values, weights are loaded, the executor is built."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, cast

import jax

from k3jax import draft_loading, draft_sharding
from k3jax import params as parameter_tree
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.compiler_flags import keep_loops_on_the_gpu
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig
from k3jax.draft_state import AcceptanceRule, Drafting, Rollback
from k3jax.loading import compute_dtype, expert_format, fill
from k3jax.pallas import dispatch, expert_load
from k3jax.programs import StepProgram
from k3jax.sharding import rules
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.mesh import make_mesh
from k3jax.step import MixedBatch
from serving.config import ConfigError, ServeConfig
from serving.core.types import ExecutorLimits
from serving.executor import DeviceExecutor
from serving.executor_identity import state_identity, weights_revision
from serving.executor_limits import limits_of
from serving.executor_settings import settings_in_effect
from serving.sizing import MEMORY_FRACTION, plan_sizes
from serving.state.store import HostMemoryStore

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]


_FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MAX_DRAFTS = 15  # of one row: a verify kernel holds 16 tokens


def build_executor(
    config: ServeConfig,
    model_config: K3Config,
    folder: pathlib.Path,
    draft_folder: pathlib.Path | None,
    report: Progress,
    check: Callable[[ExecutorLimits], object] = lambda limits: None,
) -> DeviceExecutor:
    """Load the weights, those of a draft too, size the pools and compile every program.

    `check` sees the limits before anything is compiled, which takes minutes, and may raise `ValueError`.
    Raises `ConfigError`, `LoadError` or `ValueError` with one line that says what cannot work.
    """
    _prepare_jax(config)
    platform = jax.default_backend()
    if config.dtype == "float64" and platform != "cpu":
        raise ConfigError("--dtype=float64 is for equality tests on a CPU. Use auto, bfloat16 or float32 on a GPU.")
    dtype = compute_dtype(config.dtype)
    mesh = make_mesh(config.tp, config.dcp)
    is_dummy = config.load_format == "dummy"
    checkpoint = None if is_dummy else open_checkpoint(folder)
    tree = parameter_tree.abstract(model_config, expert_format(checkpoint) if checkpoint else "mxfp4")
    parallel = _parallel(config, model_config, mesh)
    rules.check_divisible(tree, model_config, parallel)
    draft = None if draft_folder is None else draft_loading.open_draft(draft_folder, model_config)
    drafting = None if draft is None else choose_drafting(config, draft.config)
    if draft is not None:
        tree |= {"draft": draft_sharding.place(draft.tree, draft.config, parallel)}
    report("loading weights")
    if checkpoint is None:
        shardings = rules.param_shardings(tree, mesh, parallel)
        draw = jax.jit(lambda key: parameter_tree.init(tree, key, dtype), out_shardings=shardings)
        weights = draw(jax.random.key(config.seed))
    else:
        weights = fill(checkpoint, model_config, dtype, mesh, parallel)
        if draft is not None:
            weights |= {"draft": draft_loading.load_draft(draft, dtype, mesh, parallel)}
    ops, kernels = _choose_ops(config, model_config, dtype, mesh.devices.flat[0], parallel, drafting, tree)
    if dispatch.wants_repacked_experts(ops):
        report("arranging expert weights for their kernels")
        weights = expert_load.repack(tree, weights, mesh, parallel)
        tree = expert_load.repacked_tree(tree)
    device = mesh.devices.flat[0]
    sizes = plan_sizes(
        config, model_config, dtype, parallel, device, drafting, memory_fraction=_memory_fraction(config)
    )
    program = StepProgram(
        config=model_config,
        cache_shape=sizes.cache_shape,
        tree=tree,
        dtype=dtype,
        mesh=mesh,
        parallel=parallel,
        ops=ops,
        mixed_batch=cast(MixedBatch, config.mixed_batch),
        drafting=drafting,
        unstacked=platform == "cpu",
    )
    for choice in kernels:
        logger.info("%s runs on %s: %s", choice.op, choice.backend, choice.reason)
    logger.info("%s", sizes.describe())
    revision = f"random weights of seed {config.seed}" if checkpoint is None else weights_revision(checkpoint)
    if draft is not None:
        revision += f", draft {weights_revision(draft.checkpoint)}"
        logger.info("%s", _describe(draft.config, draft_folder, drafting))
    limits = limits_of(
        program,
        max_step_tokens=sizes.max_step_tokens,
        max_model_len=sizes.max_model_len,
        length_set_by=sizes.length_set_by,
        host_cache_bytes=config.host_cache_bytes,
        identity=state_identity(program, revision),
    )
    check(limits)
    report("compiling programs")
    store = HostMemoryStore(limits.host_cache_bytes) if limits.host_cache_bytes else None
    folder = _cache_folder(config)
    return DeviceExecutor(
        program,
        weights,
        limits,
        kernels=kernels,
        cache=folder,
        store=store,
        measures_costs=config.adaptive_verification is not False,
        settings=settings_in_effect(
            config,
            program,
            kernels,
            draft_folder=draft_folder,
            cache=folder,
            memory_fraction=_memory_fraction(config) if platform == "gpu" else None,
        ),
        progress=report,
    )


def choose_drafting(config: ServeConfig, draft: DraftConfig) -> Drafting:
    """How the settings use a draft. Raises `ConfigError` for a block or a number of drafts that no program holds."""
    if draft.block_size > MAX_DRAFTS:
        raise ConfigError(
            f"--draft={config.draft} drafts blocks of {draft.block_size} tokens; a step verifies at most {MAX_DRAFTS} "
            "of a request. Use a draft with a smaller block."
        )
    if config.draft_tokens is not None and config.draft_tokens > draft.block_size:
        raise ConfigError(
            f"--draft-tokens={config.draft_tokens} is more than the draft's block of {draft.block_size}. "
            f"Use 1 to {draft.block_size}."
        )
    return Drafting(
        config=draft,
        tokens=config.draft_tokens or draft.block_size,
        rollback=cast(Rollback, config.state_rollback or "replay"),
        rule=cast(AcceptanceRule, config.rejection_sampling or "standard"),
    )


def _choose_ops(
    config: ServeConfig,
    model_config: K3Config,
    dtype: Any,
    device: Any,
    parallel: Parallel,
    drafting: Drafting | None,
    tree: parameter_tree.Tree,
) -> tuple[dispatch.Ops, tuple[dispatch.Choice, ...]]:
    situation = dispatch.Situation.on(
        device,
        config=model_config,
        dtype=dtype,
        drafts=drafting.tokens if drafting else None,
        draft=drafting.config if drafting else None,
        rollback=drafting.rollback if drafting else "replay",
        expert_width=model_config.moe_intermediate_size // (1 if parallel.whole_experts else parallel.degree),
        num_ranks=parallel.degree,
        has_mxfp4_experts="w13_packed" in tree["moe"],
        moe_finalize=cast(dispatch.MoeFinalize, config.moe_finalize or "deferred"),
    )
    return dispatch.choose(situation, cast(dispatch.Kernels, config.kernels))


def _describe(draft: DraftConfig, folder: pathlib.Path | None, drafting: Drafting | None) -> str:
    assert drafting is not None
    return (
        f"draft {folder}: {draft.attention} of {draft.num_hidden_layers} layers, {drafting.tokens} tokens a round, "
        f"taps after layers {', '.join(map(str, draft.taps))} ({draft.stream}); rollback {drafting.rollback}, "
        f"rejection {drafting.rule}"
    )


def prepare_environment(config: ServeConfig) -> None:
    """Settings that jax reads when its backend starts. The user's own environment wins over what no flag says."""
    keep_loops_on_the_gpu()
    if config.memory_fraction is None:
        os.environ.setdefault(_FRACTION_VARIABLE, str(MEMORY_FRACTION))
    else:
        os.environ[_FRACTION_VARIABLE] = str(config.memory_fraction)


def _memory_fraction(config: ServeConfig) -> float:
    """The share of a GPU that jax uses: the flag's, else that of the environment, which may be the user's own."""
    return config.memory_fraction or float(os.environ.get(_FRACTION_VARIABLE, MEMORY_FRACTION))


def _prepare_jax(config: ServeConfig) -> None:
    if config.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.tp * config.dcp > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Means nothing on a GPU, and comes too late where the process uses jax already: then the mesh decides.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.tp * config.dcp)
    folder = _cache_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_folder(config: ServeConfig) -> pathlib.Path:
    """Where compiled programs are kept between starts: the flag's folder, else jax's own setting, else the user's."""
    if named := config.compile_cache or jax.config.jax_compilation_cache_dir:
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "k3jax" / "programs"


def _parallel(config: ServeConfig, model_config: K3Config, mesh: Any) -> Any:
    if config.shard_latents == "on" and mesh.size == 1:
        raise ConfigError("--shard-latents=on has no effect on one device. Leave it out or raise --tp.")
    shard = {"on": True, "off": False, "auto": None}[config.shard_latents]
    return rules.choose_parallel(model_config, mesh.devices.shape, shard)
