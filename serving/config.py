"""Everything a server can be told, as one frozen dataclass.

`serving.flags` derives the command line, the K3JAX_* environment variables and the table in docs/operations.md from the
fields below, so a setting exists in exactly one place. `None` means "chosen at start-up"; the chosen value is logged
and shown at /server_info. No device, mesh or environment access happens here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import operator
import os
import pathlib
import reprlib
import typing
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float64")
LOAD_FORMATS = ("auto", "dummy", "fake")
LOG_LEVELS = ("debug", "info", "warning", "error")
SWITCHES = ("auto", "on", "off")
TOKEN_BUDGETS = ("adaptive", "additive", "static")
CHECKPOINTS = ("internal", "split", "off")
MIXED_BATCHES = ("zero-copy", "gather")
OFFLOADS = ("host", "none")
KERNELS = ("auto", "xla", "pallas")
MOE_FINALIZES = ("deferred", "separate")
ROLLBACKS = ("replay", "snapshot")
REJECTION_RULES = ("standard", "block")
NO_DRAFT = "none"

# Settings that only mean something when a device runs the step; `--load-format fake` refuses them.
DEVICE_SETTINGS = (
    "dtype",
    "tp",
    "dcp",
    "memory_fraction",
    "shard_latents",
    "compile_cache",
    "mixed_batch",
    "checkpoint_share",
    "draft",
    "kernels",
    "moe_finalize",
)
# Whole numbers: least and most. Beyond the most no device that exists could follow, and sizes would leave 32 bits.
BOUNDS = {
    "tp": (1, 128),
    "dcp": (1, 128),
    "max_num_seqs": (1, 2**14),
    "max_step_tokens": (1, 2**17),
    "max_model_len": (2, 2**24),
    "num_pages": (2, 2**24),
    "num_slots": (2, 2**20),
    "draft_tokens": (1, 15),
    "max_waiting": (0, 10**6),
    "reserve_draft_slots": (0, 1024),
    "port": (0, 65535),
    "seed": (0, 2**63 - 1),
}
MAX_HOST_CACHE_GB = 65536
MAX_STRIDE = BOUNDS["max_model_len"][1]
PATH_SETTINGS = ("model", "draft", "compile_cache")  # Python callers may give a pathlib.Path
DRAFT_SETTINGS = ("draft_tokens", "state_rollback", "rejection_sampling", "adaptive_verification")


class ConfigError(ValueError):
    """A setting that cannot work; the message names the flag, its value and the fix."""


def setting(default: Any, group: str, help: str, *, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """Declare one field together with what its flag shows."""
    return dataclasses.field(
        default=default, metadata={"group": group, "help": help, "choices": choices, "metavar": metavar}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The settings of one server.

    Raises:
        ConfigError: a value is of another type or out of range, or a flag could not have any effect beside the others.
    """

    model: str = setting("demo", "model", "`demo`, or the folder of a checkpoint", metavar="demo|PATH")
    served_model_name: str | None = setting(
        None, "model", "name clients send as `model`; unset: `demo` or the folder's name", metavar="NAME"
    )
    load_format: str = setting(
        "auto",
        "model",
        "`auto` reads the weights, `dummy` draws random ones, `fake` runs a toy model without any device",
        choices=LOAD_FORMATS,
    )
    dtype: str = setting(
        "auto",
        "model",
        "compute type; `auto` is float32 on a CPU and bfloat16 on a GPU; float64 is for equality tests on a CPU",
        choices=DTYPES,
    )
    max_model_len: int | None = setting(
        None, "model", "prompt plus completion, in tokens; unset: the model's own limit", metavar="TOKENS"
    )
    seed: int = setting(0, "model", "seed of dummy weights and of requests that send none", metavar="N")
    tp: int = setting(1, "parallelism", "tensor parallel degree", metavar="N")
    dcp: int = setting(1, "parallelism", "decode context parallel degree; only 1 is built", metavar="N")
    shard_latents: str = setting(
        "auto", "parallelism", "shard the latent projections of the experts over tp", choices=SWITCHES
    )
    max_num_seqs: int | None = setting(
        None, "scheduling", "requests that run at once; unset: 256 on a GPU, 32 on a CPU", metavar="N"
    )
    max_waiting: int = setting(
        1024,
        "scheduling",
        "requests that may wait beside --max-num-seqs that run; beyond them: 429; 0: no bound",
        metavar="N",
    )
    max_step_tokens: int | None = setting(
        None,
        "scheduling",
        "tokens of one step; unset: 512 on a CPU, 8192 on a GPU, 16384 on one with at least 160 GB",
        metavar="TOKENS",
    )
    token_budget: str = setting(
        "adaptive",
        "scheduling",
        "how draft queries count against a step: `adaptive` apart from tokens, `additive` with each request's tokens "
        "(the published rule), `static` reserved for --max-num-seqs",
        choices=TOKEN_BUDGETS,
    )
    reserve_draft_slots: int | None = setting(
        None,
        "scheduling",
        "draft queries charged per request; `adaptive` then gives a step as many as --max-step-tokens; unset: what the "
        "draft model needs, else 0",
        metavar="N",
    )
    draft: str | None = setting(
        None,
        "speculation",
        "folder of a DSpark draft, or `none`; unset: the demo's own with --model demo, else none",
        metavar="none|PATH",
    )
    draft_tokens: int | None = setting(
        None, "speculation", "drafts a request may have verified in one step; unset: the draft's block", metavar="K"
    )
    state_rollback: str | None = setting(
        None,
        "speculation",
        "how KDA state returns to the last accepted token: `replay` rebuilds it from records, `snapshot` keeps one "
        "state per token (to compare); unset: replay",
        choices=ROLLBACKS,
    )
    rejection_sampling: str | None = setting(
        None,
        "speculation",
        "at a temperature: `standard` judges draft by draft, `block` the block as a whole; unset: standard",
        choices=REJECTION_RULES,
    )
    adaptive_verification: bool | None = setting(
        None,
        "speculation",
        "verify only as many drafts as pay, by their chances and the steps' measured costs; unset: yes",
    )
    mixed_batch: str = setting(
        "zero-copy",
        "scheduling",
        "`zero-copy` slices decode and prefill rows, `gather` picks them out in every KDA layer (to compare)",
        choices=MIXED_BATCHES,
    )
    kernels: str = setting(
        "auto",
        "scheduling",
        "`auto` takes every GPU kernel that covers model and device, `pallas` does too and refuses to start where "
        "none does, `xla` takes none",
        choices=KERNELS,
    )
    moe_finalize: str | None = setting(
        None,
        "scheduling",
        "where expert kernels run: sum their rows in the pass of the latent norm (`deferred`) or in one of its own "
        "(`separate`, to compare); unset: deferred",
        choices=MOE_FINALIZES,
    )
    overlap: bool = setting(True, "scheduling", "plan and dispatch a step before the one before it is read")
    prefix_cache: bool = setting(True, "prefix cache", "reuse MLA pages and KDA states of prompts seen before")
    checkpoint: str = setting(
        "internal",
        "prefix cache",
        "where the state at a prompt's last boundary comes from: `internal` the pass that reads the prompt, `split` a "
        "pass of its own, `off` nowhere",
        choices=CHECKPOINTS,
    )
    checkpoint_stride: int = setting(
        64, "prefix cache", "prompt checkpoints lie on multiples of this many tokens", metavar="TOKENS"
    )
    checkpoint_every: int = setting(
        0,
        "prefix cache",
        "keep a checkpoint every so many tokens of a prompt; 0: only where reuse is likely",
        metavar="TOKENS",
    )
    checkpoint_share: float = setting(
        0.3, "prefix cache", "share of the pool memory for KDA checkpoints, the rest holds pages", metavar="FRACTION"
    )
    host_cache_gb: float = setting(
        0.0, "prefix cache", "host memory for states that leave the device; 0: none", metavar="GB"
    )
    offload: str = setting(
        "host",
        "prefix cache",
        "where evicted and parked states go when there is room: `host`, or `none`, which leaves --host-cache-gb unused "
        "(to compare)",
        choices=OFFLOADS,
    )
    num_pages: int | None = setting(
        None, "memory", "KV cache pages of 64 tokens; unset: what fits --memory-fraction", metavar="N"
    )
    num_slots: int | None = setting(
        None,
        "memory",
        "KDA state slots; unset: one per running request, the null slot, and --checkpoint-share",
        metavar="N",
    )
    memory_fraction: float | None = setting(
        None, "memory", "share of device memory for weights and pools; unset: 0.9 on a GPU", metavar="FRACTION"
    )
    compile_cache: str | None = setting(
        None, "memory", "folder of the persistent compile cache; unset: the user's cache folder", metavar="DIR"
    )
    host: str = setting("127.0.0.1", "http", "address to listen on", metavar="ADDRESS")
    port: int = setting(8000, "http", "port to listen on; 0 picks a free one", metavar="PORT")
    api_key: str | None = setting(
        None, "http", "bearer token that every endpoint except /health demands", metavar="KEY"
    )
    max_body_mb: float = setting(64.0, "http", "largest request body in MiB; beyond it: 413", metavar="MB")
    shutdown_timeout_s: float = setting(
        30.0, "http", "seconds that running requests get to finish after SIGTERM", metavar="SECONDS"
    )
    log_level: str = setting("info", "http", "`debug` adds one line per HTTP request", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(field, getattr(self, field.name)))
        self._check_choices()
        self._check_ranges()
        self._check_combinations()

    @property
    def served_name(self) -> str:
        """The model name that clients send."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "demo" if self.model == "demo" else pathlib.Path(self.model).resolve().name

    @property
    def wants_draft(self) -> bool:
        """Whether a draft is named; the demo's own is taken without being named, when it fits the other settings."""
        return self.draft is not None and self.draft != NO_DRAFT

    @property
    def may_take_own_draft(self) -> bool:
        """Whether the demo's own draft is to be used."""
        return self.draft is None and self.model == "demo" and self.draft_exclusion is None

    @property
    def draft_exclusion(self) -> str | None:
        """The setting that excludes drafts, and why."""
        return next((f"{self.shown(name)}, {why}" for name, why in self._draft_exclusions().items()), None)

    def _draft_exclusions(self) -> dict[str, str]:
        """All settings that exclude drafts, and why; random weights only the demo's own."""
        exclusions = {}
        if self.mixed_batch == "gather":
            exclusions["mixed_batch"] = "which has no way to pick out rows of several tokens"
        if self.load_format == "fake":
            exclusions["load_format"] = "which runs no model"
        if self.load_format == "dummy" and not self.wants_draft:
            exclusions["load_format"] = "whose random model no draft was trained for"
        return exclusions

    @property
    def needs_draft(self) -> tuple[str, ...]:
        """The settings given that have an effect with a draft only."""
        names = [name for name in DRAFT_SETTINGS if getattr(self, name) is not None]
        if self.token_budget != "adaptive" and self.reserve_draft_slots is None:
            names.append("token_budget")
        return tuple(names)

    def shown(self, name: str) -> str:
        """A setting as its flag is written on a command line."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return switch_name(name, value)
        return f"{flag_name(name)}={value}"

    def flags_of(self, names: tuple[str, ...]) -> str:
        """The flags that gave these settings, without their values."""
        return " and ".join(self.shown(name).split("=")[0] for name in names)

    @property
    def host_cache_bytes(self) -> int:
        """Capacity of the host tier."""
        return int(self.host_cache_gb * 10**9) if self.offload == "host" else 0

    def public(self) -> dict[str, Any]:
        """All settings, without the secret one."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "(set)"
        return values

    def _check_choices(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value not in choices and not (value is None and field.default is None):
                raise ConfigError(f"{flag_name(field.name)}={value!r} is unknown. Use one of {', '.join(choices)}.")

    def _check_ranges(self) -> None:
        if not self.model:
            raise ConfigError("--model='' is empty. Use `demo` or the folder of a checkpoint.")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name is empty. Give a name or leave the flag out.")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty. Give a key or leave the flag out.")
        for name, (least, most) in BOUNDS.items():
            _require(self, name, lambda value, low=least, high=most: low <= value <= high, f"Use {least} to {most}.")
        for name, least in (("checkpoint_stride", 64), ("checkpoint_every", 0)):
            _require(
                self,
                name,
                lambda value, low=least: low <= value <= MAX_STRIDE and value % 64 == 0,
                f"Use a multiple of 64 from {least} to {MAX_STRIDE}.",
            )
        _require(self, "checkpoint_share", lambda value: 0 <= value < 1, "Use a share from 0 to below 1.")
        _require(
            self, "host_cache_gb", lambda value: 0 <= value <= MAX_HOST_CACHE_GB, f"Use 0 to {MAX_HOST_CACHE_GB} GB."
        )
        _require(self, "memory_fraction", lambda value: 0 < value <= 1, "Use a share above 0 and at most 1.")
        _require(self, "max_body_mb", lambda value: 0 < value <= 4096, "Use more than 0 and at most 4096.")
        _require(self, "shutdown_timeout_s", lambda value: 0 <= value <= 86400, "Use 0 to 86400 seconds.")

    def _check_combinations(self) -> None:
        if self.dcp > 1:
            raise ConfigError(
                f"--dcp={self.dcp} is not built yet: the MLA cache is not split along the sequence. Leave it at 1."
            )
        if self.memory_fraction is not None and self.num_pages is not None:
            raise ConfigError(
                f"--memory-fraction={self.memory_fraction} has no effect beside --num-pages={self.num_pages}, "
                "which fixes the pool. Give one of them."
            )
        if self.kernels == "xla":
            self._refuse_beside("moe_finalize", "--kernels=xla", "which leaves no expert rows to sum")
        if self.load_format == "fake":
            for name in DEVICE_SETTINGS:
                if name != "draft" or self.draft == NO_DRAFT:  # the folder of one is refused with what goes with it
                    self._refuse_beside(name, "--load-format=fake", "which runs on no device")
        self._check_prefix_cache()
        self._check_drafts()

    def _check_prefix_cache(self) -> None:
        if not self.prefix_cache:
            for name in ("checkpoint", "checkpoint_stride", "checkpoint_every", "checkpoint_share", "host_cache_gb"):
                self._refuse_beside(name, "--no-prefix-cache", "which keeps nothing")
        if self.checkpoint == "off":
            for name in ("checkpoint_stride", "checkpoint_every", "checkpoint_share"):
                self._refuse_beside(name, "--checkpoint=off", "which keeps no state of a prompt")
        if self.num_slots is not None:
            self._refuse_beside("checkpoint_share", f"--num-slots={self.num_slots}", "which fixes the slots")
        if self.offload == "none" and self.host_cache_gb == 0:
            raise ConfigError(
                "--offload=none has no effect without --host-cache-gb: nothing leaves the device. Leave it out."
            )
        if self.checkpoint_every % self.checkpoint_stride:
            raise ConfigError(
                f"--checkpoint-every={self.checkpoint_every} leaves checkpoints that --checkpoint-stride="
                f"{self.checkpoint_stride} rules out. Use a multiple of {self.checkpoint_stride}."
            )

    def _check_drafts(self) -> None:
        if self.draft is not None and not self.draft.strip():
            raise ConfigError("--draft is empty. Use `none` or the folder of a draft.")
        if self.token_budget != "adaptive" and self.reserve_draft_slots == 0:
            raise ConfigError(
                f"{self.shown('token_budget')} has no effect beside --reserve-draft-slots=0: no draft queries are "
                "charged. Leave out --token-budget, or give --reserve-draft-slots of 1 or more."
            )
        exclusions = self._draft_exclusions()
        has_draft = self.may_take_own_draft or (self.wants_draft and not exclusions)
        names = (("draft",) if self.wants_draft else ()) + self.needs_draft
        if names and not has_draft:
            raise ConfigError(f"{self._why_no_draft(names)} {self._draft_fixes(names, tuple(exclusions))}")

    def _why_no_draft(self, names: tuple[str, ...]) -> str:
        """One sentence: what becomes of the settings `names` without a draft, and why there is none."""
        given = " and ".join(self.shown(name) for name in names)
        if self.wants_draft:
            return f"{given} cannot be used beside {self.draft_exclusion}."
        if self.draft == NO_DRAFT:
            beside = "beside --draft=none"
        else:
            beside = f"beside {self.draft_exclusion}" if self.model == "demo" else "without a draft"
        return f"{given} {'have' if len(names) > 1 else 'has'} no effect {beside}: nothing is drafted."

    def _draft_fixes(self, names: tuple[str, ...], exclusions: tuple[str, ...]) -> str:
        """One sentence: each of the ways to set right that `names` need a draft, which alone is enough."""
        fixes = [f"leave out {self.flags_of(names)}"]
        if self.wants_draft:
            fixes.append(f"leave out {self.flags_of(exclusions)}")
        elif self.model == "demo":
            blocking = (("draft",) if self.draft == NO_DRAFT else ()) + exclusions
            fixes.append(f"leave out {self.flags_of(blocking)}")
        without = tuple(name for name in exclusions if self.shown(name) != "--load-format=dummy")
        if not self.wants_draft and (not without or self.model != "demo"):
            first = f"leave out {self.flags_of(without)} and " if without else ""
            fixes.append(f"{first}give the folder of a draft with --draft")
        if names == ("token_budget",):
            fixes.append("give --reserve-draft-slots of 1 or more")
        sentence = ", ".join(fixes[:-1]) + (", or " if len(fixes) > 1 else "") + fixes[-1]
        return f"{sentence[0].upper()}{sentence[1:]}."

    def _refuse_beside(self, name: str, other: str, why: str) -> None:
        """Raise when `name` was given although `other` takes its effect away."""
        field = next(field for field in dataclasses.fields(self) if field.name == name)
        value = getattr(self, name)
        if value != field.default:
            raise ConfigError(f"{self.shown(name)} has no effect beside {other}, {why}. Leave one of them out.")


def flag_name(field_name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field_name.replace("_", "-")


def switch_name(field_name: str, value: bool) -> str:
    """`overlap`, False -> `--no-overlap`."""
    return flag_name(field_name if value else f"no_{field_name}")


@functools.cache
def value_type(field_name: str) -> type:
    """The type of a setting's value, `None` aside."""
    annotation = typing.get_type_hints(ServeConfig)[field_name]
    return next(kind for kind in (typing.get_args(annotation) or (annotation,)) if kind is not type(None))


def _plain(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value as Python's own type; integers and numbers of NumPy are welcome. Raises `ConfigError`."""
    kind, choices = value_type(field.name), field.metadata["choices"]
    if value is None and field.default is None:
        return None
    if field.name in PATH_SETTINGS and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool) is (kind is bool):
        with contextlib.suppress(TypeError):  # what is of another type is refused below
            if kind is int:
                return operator.index(typing.cast(Any, value))
            if kind is float and isinstance(value, numbers.Real):
                return _float(value)
            if isinstance(value, kind):
                return value
    wanted = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}[kind]
    if choices:
        wanted = f"one of {', '.join(choices)}"
    elif field.name in PATH_SETTINGS:
        words = [repr(word) for word in field.metadata["metavar"].split("|") if word.islower()]
        wanted = " or ".join([*words, "a path (a string or a pathlib.Path)"])
    unset = ", or leave it out" if field.default is None else f"; the default is {field.default!r}"
    raise ConfigError(f"{field.name}={reprlib.repr(value)} is of type {type(value).__name__}. Give {wanted}{unset}.")


def _float(value: Any) -> float:
    """Beyond the largest float is out of every range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _require(config: ServeConfig, name: str, accepts: Any, fix: str) -> None:
    value = getattr(config, name)
    # NaN fails every comparison, so it is refused with the rest.
    if value is not None and not accepts(value):
        raise ConfigError(f"{flag_name(name)}={value!r} is out of range. {fix}")
