"""The two grouped GEMMs of the routed experts, for tiles of rows that share an expert. Imports Triton: import it late.

    gated:  hidden[p] = SiTU(w1_e x[token_p], w3_e x[token_p])        plain:  out[p] = w2_e hidden[p]

Weights are the left operand, so a tile is [features, rows]: its rows are the narrow side of the tensor cores'
instruction (16 and up) instead of the wide one (64 or 128), and Hopper feeds the unpacked weights from registers.
`dot_scaled` takes E2M1 codes with their E8M0 scales as checkpoints have them. With bfloat16 rows, codes are unpacked
to bfloat16, exactly but for scale bytes 0 and 1 (near 2^-127), which some versions of Triton take for zero, and 255,
which they take for infinity; with E4M3 rows Blackwell multiplies both as they are. Accumulation is in float32.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_GROUP = tl.constexpr(32)


@triton.jit
def _products(
    weight_rows,  # [M] row of each feature among all weight rows
    weights_ptr,  # [..., CONTRACTION / 2] u8, low nibble first
    scales_ptr,  # [..., CONTRACTION / 32] u8
    x_rows,  # [ROWS]
    x_ptr,  # [..., CONTRACTION] bf16 or e4m3
    x_scale_ptr,  # [..., CONTRACTION / 32] u8, or None
    CONTRACTION: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[M, ROWS] float32, summed in order of the contraction."""
    codes = tl.arange(0, DEPTH // 2)
    groups = tl.arange(0, DEPTH // _GROUP)
    weights = weights_ptr + (weight_rows * (CONTRACTION // 2))[:, None] + codes[None, :]
    scales = scales_ptr + (weight_rows * (CONTRACTION // _GROUP))[:, None] + groups[None, :]
    xs = x_ptr + (x_rows * CONTRACTION)[None, :] + tl.arange(0, DEPTH)[:, None]
    total = tl.zeros((M, ROWS), tl.float32)
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + (x_rows * (CONTRACTION // _GROUP))[:, None] + groups[None, :]
    for step in range(0, CONTRACTION // DEPTH):
        w = tl.load(weights + step * (DEPTH // 2))
        w_scale = tl.load(scales + step * (DEPTH // _GROUP))
        x = tl.load(xs + step * DEPTH)
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scales + step * (DEPTH // _GROUP))
            total = tl.dot_scaled(w, w_scale, "e2m1", x, x_scale, "e4m3", total)
        else:
            total = tl.dot_scaled(w, w_scale, "e2m1", x, None, "bf16", total)
    return total


@triton.jit
def _tanh(x):
    """To a few units in the last place; a series near zero, where the other form cancels."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    far = 1 - 2 / (tl.exp(2 * x) + 1)
    return tl.where(square < 0.04, near, far)


@triton.jit
def _situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    capped_gate = BETA * _tanh(gate / BETA) / (1 + tl.exp(-gate))
    return capped_gate * (LINEAR_BETA * _tanh(up / LINEAR_BETA))


@triton.jit
def _scale_byte(largest):
    """`mxfp8.choose_scale`."""
    bits = largest.to(tl.int32, bitcast=True)  # not negative
    exponent = bits >> 23
    byte = tl.maximum(exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    return tl.where(exponent == 255, 255, byte)


@triton.jit
def gated_kernel(
    x_ptr,  # [T, CONTRACTION] bf16 or e4m3
    x_scale_ptr,  # [T, CONTRACTION / 32] u8, or None
    tokens_ptr,  # [P] token of each row
    tiles_ptr,  # [3, NUM_TILES] expert, first row, live rows
    layer_ptr,  # [1]
    weights_ptr,  # [layers, EXPERTS, 2, FEATURES, CONTRACTION / 2] u8
    scales_ptr,  # [layers, EXPERTS, 2, FEATURES, CONTRACTION / 32] u8
    hidden_ptr,  # [P, FEATURES]
    hidden_scale_ptr,  # [P, FEATURES / 32] u8, or None
    NUM_TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    CONTRACTION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    M: tl.constexpr,  # gate features and as many up features
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    HALF: tl.constexpr = M // 2
    tile = tl.program_id(1)
    live = tl.load(tiles_ptr + 2 * NUM_TILES + tile)
    if live > 0:
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + NUM_TILES + tile)
        # Stacked weights have more than 2^31 elements.
        matrix = 2 * (tl.load(layer_ptr).to(tl.int64) * EXPERTS + expert)
        begin = tl.program_id(0) * HALF
        row = tl.arange(0, M)
        weight_rows = (matrix + row // HALF) * FEATURES + begin + row % HALF
        place = tl.arange(0, ROWS)
        is_live = place < live
        position = (first + tl.where(is_live, place, 0)).to(tl.int64)
        tokens = tl.load(tokens_ptr + position).to(tl.int64)
        both = _products(weight_rows, weights_ptr, scales_ptr, tokens, x_ptr, x_scale_ptr, CONTRACTION, M, ROWS, DEPTH)
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, HALF, ROWS)), (1, 2, 0)))
        hidden = _situ(gate, up, BETA, LINEAR_BETA)
        if hidden_scale_ptr is not None:
            grouped = tl.reshape(hidden, (HALF // _GROUP, _GROUP, ROWS))
            byte = _scale_byte(tl.max(tl.abs(grouped), axis=1))
            inverse = ((254 - tl.minimum(byte, 254)) << 23).to(tl.float32, bitcast=True)
            hidden = tl.reshape(grouped * inverse[:, None, :], (HALF, ROWS))
            group = begin // _GROUP + tl.arange(0, HALF // _GROUP)
            scale_at = hidden_scale_ptr + (position * (FEATURES // _GROUP))[None, :] + group[:, None]
            tl.store(scale_at, byte.to(tl.uint8), mask=is_live[None, :])
        feature = begin + tl.arange(0, HALF)
        out = hidden_ptr + (position * FEATURES)[None, :] + feature[:, None]
        tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), mask=is_live[None, :])


@triton.jit
def plain_kernel(
    x_ptr,  # [P, CONTRACTION] bf16 or e4m3
    x_scale_ptr,  # [P, CONTRACTION / 32] u8, or None
    tiles_ptr,  # [3, NUM_TILES] expert, first row, live rows
    layer_ptr,  # [1]
    weights_ptr,  # [layers, EXPERTS, FEATURES, CONTRACTION / 2] u8
    scales_ptr,  # [layers, EXPERTS, FEATURES, CONTRACTION / 32] u8
    out_ptr,  # [P, FEATURES]
    NUM_TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    CONTRACTION: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(1)
    live = tl.load(tiles_ptr + 2 * NUM_TILES + tile)
    if live > 0:
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + NUM_TILES + tile)
        matrix = tl.load(layer_ptr).to(tl.int64) * EXPERTS + expert
        feature = tl.program_id(0) * M + tl.arange(0, M)
        place = tl.arange(0, ROWS)
        is_live = place < live
        position = (first + tl.where(is_live, place, 0)).to(tl.int64)
        total = _products(
            matrix * FEATURES + feature,
            weights_ptr,
            scales_ptr,
            position,
            x_ptr,
            x_scale_ptr,
            CONTRACTION,
            M,
            ROWS,
            DEPTH,
        )
        out = out_ptr + (position * FEATURES)[None, :] + feature[:, None]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_live[None, :])
