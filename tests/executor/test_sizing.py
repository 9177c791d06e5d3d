"""How memory is split, on stand-in devices that only report numbers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from k3jax import cache, presets
from k3jax.sharding.collectives import SINGLE, Parallel
from serving.config import ConfigError, ServeConfig
from serving.sizing import CPU_POOL_BYTES, plan_sizes

CONFIG = presets.tiny_mesh()
PAGE_BYTES, SLOT_BYTES = cache.pool_bytes(CONFIG, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What sizing asks of a device."""

    platform: str = "cpu"
    bytes_limit: int = 0
    bytes_in_use: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}


def sizes(device=None, parallel=SINGLE, model=CONFIG, **flags):
    return plan_sizes(ServeConfig(**flags), model, jnp.float32, parallel, device or Device())


def test_defaults_differ_between_a_cpu_and_a_gpu():
    cpu = sizes()
    gpu = sizes(Device(platform="gpu", bytes_limit=10**10))
    assert (cpu.cache_shape.num_rows, cpu.max_step_tokens) == (32, 512)
    assert (gpu.cache_shape.num_rows, gpu.max_step_tokens) == (256, 8192)
    assert cpu.max_model_len == gpu.max_model_len == CONFIG.max_position_embeddings


def test_every_flag_is_taken_as_given():
    got = sizes(max_num_seqs=5, max_step_tokens=100, max_model_len=200, num_pages=30, num_slots=4)
    shape = got.cache_shape
    assert (shape.num_rows, shape.num_pages, shape.num_slots) == (5, 30, 4)
    assert (got.max_step_tokens, got.max_model_len) == (100, 200)
    assert "29 pages = 1856 tokens, 3 slots (0 for checkpoints); 5 requests at once, 200 tokens each" in got.describe()


def test_every_row_gets_a_slot_and_its_page_table_holds_the_longest_request():
    got = sizes(max_num_seqs=5, prefix_cache=False)
    assert got.cache_shape.num_slots == 6
    assert got.cache_shape.pages_per_row * 64 >= got.max_model_len


def test_a_gpu_gives_what_weights_slots_and_workspace_leave_to_pages():
    device = Device(platform="gpu", bytes_limit=150_000_000, bytes_in_use=100_000_000)
    got = sizes(device, max_num_seqs=64)
    shape = got.cache_shape
    used = shape.num_pages * PAGE_BYTES + shape.num_slots * SLOT_BYTES + 100_000_000
    assert 0.92 * 150_000_000 - PAGE_BYTES - SLOT_BYTES < used <= 0.92 * 150_000_000
    divided = sizes(device, Parallel(axes=("tp", "dcp"), sizes=(4, 1)), max_num_seqs=64)
    saved = 65 * SLOT_BYTES * 3 // 4  # KDA states are divided over the ranks, pages are not
    assert divided.cache_shape.num_pages - got.cache_shape.num_pages == pytest.approx(0.7 * saved / PAGE_BYTES, abs=2)


def test_no_more_pages_are_made_than_all_rows_can_use():
    roomy = Device(platform="gpu", bytes_limit=10**12)
    assert sizes(roomy, max_num_seqs=2, max_model_len=640).cache_shape.num_pages == 2 * 10 + 1


def test_the_model_length_shrinks_to_the_pages_unless_it_was_asked_for():
    assert sizes(num_pages=9).max_model_len == 512
    assert sizes(num_pages=9).length_set_by == "pages"
    with pytest.raises(ConfigError, match="not enough memory for one request: 513 tokens need 9 pages"):
        sizes(num_pages=9, max_model_len=513)
    assert sizes(num_pages=9, max_model_len=512).max_model_len == 512
    assert sizes(num_pages=9, max_model_len=512).length_set_by == "setting"
    assert sizes(num_pages=65).length_set_by == "model"  # 4096 tokens, all that the model reads


def test_a_full_device_is_refused():
    full = Device(platform="gpu", bytes_limit=10**9, bytes_in_use=10**9)
    with pytest.raises(ConfigError, match=r"not enough memory for one request.*, 0 fit.*--num-pages"):
        sizes(full)


@pytest.mark.parametrize("flags", [{}, {"max_model_len": 640}])
def test_a_share_that_leaves_no_pages_is_what_the_refusal_names(flags):
    device = Device(platform="gpu", bytes_limit=10**9)
    words = r"0 fit. Lower --checkpoint-share=0.999999 to at most 0.99\d+\.$"
    with pytest.raises(ConfigError, match=words) as error:
        sizes(device, checkpoint_share=0.999999, max_num_seqs=2, **flags)
    advised = float(str(error.value).removesuffix(".").rsplit(" ", 1)[1])
    assert sizes(device, checkpoint_share=advised, max_num_seqs=2, **flags).cache_shape.num_pages >= 2


@pytest.mark.parametrize("device", [Device(), Device(platform="gpu", bytes_limit=4 * 10**8)])
@pytest.mark.parametrize(
    ("flag", "value", "also"),
    [
        ("num_pages", 2**24, {}),
        ("num_pages", 2**16, {"max_num_seqs": 4}),
        ("num_slots", 2**20, {}),
        ("num_slots", 2**20, {"num_pages": 9}),
        ("max_num_seqs", 2**14, {}),
        ("max_num_seqs", 2**14, {"num_pages": 9}),
    ],
)
def test_pools_beyond_the_memory_are_refused_with_what_fits(device, flag, value, also, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4 * 10**8 // 4096}.__getitem__)
    large = dataclasses.replace(CONFIG, max_position_embeddings=2**23)
    name = "--" + flag.replace("_", "-")
    given: dict[str, Any] = {flag: value, **also}
    with pytest.raises(ConfigError, match=rf"{name}={value} needs too much memory: .*Use at most \d+\.$") as error:
        sizes(device, model=large, **given)
    most = int(str(error.value).removesuffix(".").rsplit(" ", 1)[1])
    given[flag] = most
    sizes(device, model=large, **given)
    given[flag] = most + 2
    with pytest.raises(ConfigError, match=name):
        sizes(device, model=large, **given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": 4097}, "--max-model-len=4097 exceeds the model's limit. Use at most 4096."),
        ({"max_step_tokens": 63}, "--max-step-tokens=63 is below the chunk grid. Use at least 64."),
        ({"memory_fraction": 0.5}, "--memory-fraction works on a GPU only"),
    ],
)
def test_a_flag_that_cannot_work_is_refused(flags, words):
    """D68."""
    with pytest.raises(ConfigError) as error:
        sizes(**flags)
    assert words in str(error.value)


def test_the_pool_of_a_cpu_is_bounded():
    large = dataclasses.replace(CONFIG, max_position_embeddings=2**23)
    got = sizes(model=large)
    shape = got.cache_shape
    used = shape.num_pages * PAGE_BYTES + (shape.num_slots - shape.num_rows - 1) * SLOT_BYTES
    assert CPU_POOL_BYTES - PAGE_BYTES - SLOT_BYTES < used <= CPU_POOL_BYTES
    assert got.max_model_len == (got.cache_shape.num_pages - 1) * 64


def test_checkpoints_get_their_share_and_none_without_a_prefix_cache():
    device = Device(platform="gpu", bytes_limit=10**9)
    left = 0.92 * 10**9 - 65 * SLOT_BYTES

    def checkpoints(**flags) -> int:
        shape = sizes(
            device, model=dataclasses.replace(CONFIG, max_position_embeddings=2**23), max_num_seqs=64, **flags
        )
        return shape.cache_shape.num_slots - 65

    assert checkpoints() == int(0.3 * left // SLOT_BYTES)
    assert checkpoints(checkpoint_share=0.1) == int(0.1 * left // SLOT_BYTES)
    assert checkpoints(prefix_cache=False) == checkpoints(checkpoint="off") == 0


def test_a_cache_that_keeps_no_states_leaves_all_memory_to_pages():
    """Or a comparison of --checkpoint off with --no-prefix-cache, or with `internal`, would be of memory."""
    device = Device(platform="gpu", bytes_limit=10**9)
    model = dataclasses.replace(CONFIG, max_position_embeddings=2**23)
    off = sizes(device, model=model, checkpoint="off").cache_shape
    assert off == sizes(device, model=model, prefix_cache=False).cache_shape
    assert off.num_pages > sizes(device, model=model, checkpoint="split").cache_shape.num_pages


@pytest.mark.parametrize("fraction", [0.3, 0.74, 0.9, 0.97, 1.0])
@pytest.mark.parametrize(
    ("gigabytes", "tokens"), [(141, 8192), (150, 8192), (159.9, 8192), (160, 16384), (192, 16384), (288, 16384)]
)
def test_a_large_gpu_takes_more_tokens_a_step_whatever_share_of_it_is_used(gigabytes, tokens, fraction):
    device = Device(platform="gpu", bytes_limit=int(fraction * gigabytes * 10**9))
    got = plan_sizes(ServeConfig(), CONFIG, jnp.float32, SINGLE, device, memory_fraction=fraction)
    assert got.max_step_tokens == tokens
