"""Everything a server can be told, as one frozen dataclass.

`serving.flags` derives the command line, the K3JAX_* environment variables and the table in docs/operations.md from the
fields below, so a setting exists in exactly one place. `None` means "chosen at start-up"; the chosen value is logged
and shown at /server_info. No device, mesh or environment access happens here.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float64")
LOAD_FORMATS = ("auto", "dummy", "fake")
LOG_LEVELS = ("debug", "info", "warning", "error")
SWITCHES = ("auto", "on", "off")

# Settings that only mean something when a device runs the step; `--load-format fake` refuses them.
DEVICE_SETTINGS = ("dtype", "tp", "dcp", "memory_fraction", "shard_latents", "compile_cache")


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
        ConfigError: a value is out of range, or a flag could not have any effect beside the others.
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
    max_step_tokens: int | None = setting(
        None, "scheduling", "tokens of one step; unset: 8192 on a GPU, 512 on a CPU", metavar="TOKENS"
    )
    num_pages: int | None = setting(
        None, "memory", "KV cache pages of 64 tokens; unset: what fits --memory-fraction", metavar="N"
    )
    num_slots: int | None = setting(
        None, "memory", "KDA state slots; unset: one per running request and the null slot", metavar="N"
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
        self._check_choices()
        self._check_ranges()
        self._check_combinations()

    @property
    def served_name(self) -> str:
        """The model name that clients send."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "demo" if self.model == "demo" else pathlib.Path(self.model).resolve().name

    def public(self) -> dict[str, Any]:
        """All settings, without the secret one."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "(set)"
        return values

    def _check_choices(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise ConfigError(f"{flag_name(field.name)}={value!r} is unknown. Use one of {', '.join(choices)}.")

    def _check_ranges(self) -> None:
        if not self.model:
            raise ConfigError("--model='' is empty. Use `demo` or the folder of a checkpoint.")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name is empty. Give a name or leave the flag out.")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty. Give a key or leave the flag out.")
        for name in ("tp", "dcp", "max_num_seqs", "max_step_tokens"):
            _require(self, name, lambda value: value >= 1, "Use 1 or more.")
        for name in ("max_model_len", "num_pages", "num_slots"):
            _require(self, name, lambda value: value >= 2, "Use 2 or more.")
        _require(self, "memory_fraction", lambda value: 0 < value <= 1, "Use a share above 0 and at most 1.")
        _require(self, "port", lambda value: 0 <= value <= 65535, "Use 0 to 65535.")
        _require(self, "max_body_mb", lambda value: 0 < value <= 4096, "Use more than 0 and at most 4096.")
        _require(self, "shutdown_timeout_s", lambda value: 0 <= value <= 86400, "Use 0 to 86400 seconds.")
        _require(self, "seed", lambda value: 0 <= value < 2**63, "Use 0 to 2**63 - 1.")

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
        if self.load_format == "fake":
            for field in dataclasses.fields(self):
                if field.name in DEVICE_SETTINGS and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{flag_name(field.name)}={getattr(self, field.name)!r} has no effect with --load-format fake, "
                        "which runs on no device. Leave one of them out."
                    )


def flag_name(field_name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field_name.replace("_", "-")


def _require(config: ServeConfig, name: str, accepts: Any, fix: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    # NaN fails every comparison, so it is refused with the rest.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not accepts(value):
        raise ConfigError(f"{flag_name(name)}={value!r} is out of range. {fix}")
