"""Triton: the projection of the streams onto the coefficients, alone and in one pass with the connection in front of it.

The norm in front of the projection is folded: (1 + w) into phi once per weight set, the inverse root mean square into the result, so
that one read of the streams feeds the product and the sum of squares. phi stays exact enough on bf16 tensor cores as a sum of two
bf16 numbers (16 bits; the streams are bf16 already, products are exact, sums fp32). Sinkhorn runs in the end of the projection on a
whole tile of tokens at once.
"""

# Triton joins tuples with + only, and a tuple grows in a loop:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def _store_coefficients(
    res, ends, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
    SCALE: tl.constexpr, SINK_EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # res [ROWS, NP * NP] and ends [ROWS, NP * NP] (columns pre, post, unused) to one row of N * (N + 2) coefficients: pre, post, res.
    q = tl.arange(0, NP * NP)
    to_pre = q < N
    to_post = (q >= NP) & (q < NP + N)
    base = out_ptr + rows.to(tl.int64) * (N * (N + 2))
    alpha = tl.where(to_pre, tl.load(alpha_pre_ptr), tl.load(alpha_post_ptr)) * SCALE
    bias = tl.load(bias_pre_ptr + q, mask=to_pre, other=0.0) + tl.load(bias_post_ptr + q - NP, mask=to_post, other=0.0)
    value = tl.sigmoid(alpha[None, :] * ends + bias[None, :]) * tl.where(to_pre, 1.0, 2.0)[None, :]
    column = tl.where(to_pre, q, q - NP + N)
    tl.store(base[:, None] + column[None, :], value.to(out_ptr.dtype.element_ty), mask=live[:, None] & (to_pre | to_post)[None, :])

    i, j = q // NP, q % NP
    inside = (i < N) & (j < N)
    logits = (tl.load(alpha_res_ptr) * SCALE) * res + tl.load(bias_res_ptr + i * N + j, mask=inside, other=0.0)[None, :]
    logits = tl.where(inside[None, :], logits, float("-inf"))
    matrix = tl.reshape(tl.exp(logits - tl.max(logits, axis=1)[:, None]), (ROWS, NP, NP))
    for _ in tl.range(ITERATIONS):
        matrix = matrix / (tl.sum(matrix, axis=1)[:, None, :] + SINK_EPS)
        matrix = matrix / (tl.sum(matrix, axis=2)[:, :, None] + SINK_EPS)
    flat = tl.reshape(matrix, (ROWS, NP * NP))
    to_res = 2 * N + i * N + j
    tl.store(base[:, None] + to_res[None, :], flat.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _store_projection(
    minus, squares, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
    WIDTH: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SINK_EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    ITERATIONS: tl.constexpr, COEFFICIENTS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # The norm, then coefficients or the projection itself, from the negative product and the squares of whole rows.
    HALF: tl.constexpr = NP * NP
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + EPS)
    if PARTS == 2:
        minus = tl.sum(tl.reshape(minus, (ROWS, 2, 2 * HALF)), axis=1)
    acc = minus * -inverse[:, None]
    if COEFFICIENTS:
        res, ends = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
        _store_coefficients(
            res, ends, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
            SCALE, SINK_EPS, N, NP, ITERATIONS, ROWS,
        )  # fmt: skip
    else:
        p = tl.arange(0, 2 * HALF)
        q = p - HALF
        i, j = p // NP, p % NP
        column = tl.where(p < HALF, 2 * N + i * N + j, tl.where(q < NP, q, q - NP + N))
        used = tl.where(p < HALF, (i < N) & (j < N), (q < N) | ((q >= NP) & (q < NP + N)))
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * (N * (N + 2)) + column[None, :], acc, mask=live[:, None] & used[None, :])


@triton.jit
def _accumulate(
    row_ptr, phi_ptr, mine, minus, squares, WIDTH: tl.constexpr, WIDE: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    # Subtracts the rows `mine` times phi [WIDTH, WIDE] from minus, and adds their squares to squares. Subtraction, because Triton (3.6)
    # lets a product that is added run on into the next iteration while it refills the buffer of x, which it counts as free once the
    # squares have been read: a race, seen as errors of 1e-3 on an H200 with most tiles. A product that is subtracted ends here.
    EVEN: tl.constexpr = WIDTH % COLS == 0
    n = tl.arange(0, WIDE)
    for k0 in tl.range(0, WIDTH, COLS, num_stages=STAGES):
        k = k0 + tl.arange(0, COLS)
        if EVEN:
            x = tl.load(row_ptr + k[None, :], mask=mine[:, None], other=0.0)
            phi = tl.load(phi_ptr + k[:, None] * WIDE + n[None, :])
        else:
            x = tl.load(row_ptr + k[None, :], mask=mine[:, None] & (k < WIDTH)[None, :], other=0.0)
            phi = tl.load(phi_ptr + k[:, None] * WIDE + n[None, :], mask=(k < WIDTH)[:, None], other=0.0)
        minus -= tl.dot(x, phi, input_precision="ieee")
        wide = x.to(tl.float32)
        squares += wide * wide
    return minus, squares


@triton.jit(do_not_specialize=["S"])
def project(
    streams_ptr, folded_ptr, ids_ptr, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
    S, stride, WIDTH: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SINK_EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    ITERATIONS: tl.constexpr, COEFFICIENTS: tl.constexpr, PER_MODALITY: tl.constexpr, MODALITIES: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 2 * NP * NP * PARTS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < S
    row_ptr = streams_ptr + rows.to(tl.int64)[:, None] * stride
    minus = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    squares = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if PER_MODALITY:
        # A tile has one modality, except the few where two runs meet: those take one pass for each, over their own rows.
        modality = tl.load(ids_ptr + rows, mask=live, other=-1)
        m = tl.min(tl.where(modality >= 0, modality, MODALITIES), axis=0)
        while m < MODALITIES:
            block_ptr = folded_ptr + m.to(tl.int64) * (WIDTH * WIDE)
            minus, squares = _accumulate(row_ptr, block_ptr, modality == m, minus, squares, WIDTH, WIDE, COLS, STAGES)
            m = tl.min(tl.where(modality > m, modality, MODALITIES), axis=0)
    else:
        minus, squares = _accumulate(row_ptr, folded_ptr, live, minus, squares, WIDTH, WIDE, COLS, STAGES)
    _store_projection(
        minus, squares, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
        WIDTH, EPS, SCALE, SINK_EPS, N, NP, ITERATIONS, COEFFICIENTS, PARTS, ROWS,
    )  # fmt: skip


@triton.jit
def _accumulate_mixed(
    row_ptr, branch_row, out_row, post, res, phi_ptr, mine, minus, squares, C: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Connects the rows `mine`, stores them, and does with what was stored what `_accumulate` does with what it reads. The streams
    # (four at most) meet phi interleaved, channel before stream: in four products the compiler would mix every stream twice.
    tl.static_assert(N <= 4)
    kind = out_row.dtype.element_ty
    n = tl.arange(0, WIDE)
    k = tl.arange(0, 4 * COLS)
    for c0 in tl.range(0, C, COLS, num_stages=STAGES):
        c = c0 + tl.arange(0, COLS)
        mask = mine[:, None] & (c < C)[None, :]
        streams = ()
        for s in tl.static_range(N):
            x = tl.load(row_ptr + (s * C + c)[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            streams = streams + (x.to(tl.float32),)
        branch = tl.load(branch_row + c[None, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        mixes = ()
        for i in tl.static_range(N):
            mixed = tl.zeros([ROWS, COLS], dtype=tl.float32)
            for s in tl.static_range(N):
                mixed += res[i * N + s][:, None] * streams[s]
            mixed += post[i][:, None] * branch
            kept = mixed.to(kind)
            tl.store(out_row + (i * C + c)[None, :], kept, mask=mask)
            wide = kept.to(tl.float32)
            squares += wide * wide
            mixes = mixes + (kept,)
        for _ in tl.static_range(N, 4):
            mixes = mixes + (tl.zeros([ROWS, COLS], dtype=kind),)
        joined = tl.join(tl.join(mixes[0], mixes[2]), tl.join(mixes[1], mixes[3]))
        at = c0 + k // 4
        phi_row = phi_ptr + ((k % 4) * C + at)[:, None] * WIDE
        phi = tl.load(phi_row + n[None, :], mask=((k % 4 < N) & (at < C))[:, None], other=0.0)
        minus -= tl.dot(tl.reshape(joined, (ROWS, 4 * COLS)), phi, input_precision="ieee")
    return minus, squares


@triton.jit(do_not_specialize=["S"])
def connect_project(
    streams_ptr, branch_ptr, post_ptr, res_ptr, mixed_ptr, folded_ptr, ids_ptr, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
    bias_pre_ptr, bias_post_ptr, bias_res_ptr, S, stride, branch_stride, post_stride, res_stride, C: tl.constexpr, EPS: tl.constexpr,
    SCALE: tl.constexpr, SINK_EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ITERATIONS: tl.constexpr, PER_MODALITY: tl.constexpr,
    MODALITIES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 2 * NP * NP * PARTS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    far = rows.to(tl.int64)
    live = rows < S
    row_ptr = streams_ptr + far[:, None] * stride
    branch_row = branch_ptr + far[:, None] * branch_stride
    mixed_row = mixed_ptr + far[:, None] * (N * C)
    post, res = (), ()
    for i in tl.static_range(N):
        post = post + (tl.load(post_ptr + far * post_stride + i, mask=live, other=0.0).to(tl.float32),)
    for i in tl.static_range(N * N):
        res = res + (tl.load(res_ptr + far * res_stride + i, mask=live, other=0.0).to(tl.float32),)
    minus = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    squares = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if PER_MODALITY:
        # As in `project`.
        modality = tl.load(ids_ptr + rows, mask=live, other=-1)
        m = tl.min(tl.where(modality >= 0, modality, MODALITIES), axis=0)
        while m < MODALITIES:
            block_ptr = folded_ptr + m.to(tl.int64) * (N * C * WIDE)
            minus, squares = _accumulate_mixed(
                row_ptr, branch_row, mixed_row, post, res, block_ptr, modality == m, minus, squares, C, N, WIDE, ROWS, COLS, STAGES
            )
            m = tl.min(tl.where(modality > m, modality, MODALITIES), axis=0)
    else:
        minus, squares = _accumulate_mixed(
            row_ptr, branch_row, mixed_row, post, res, folded_ptr, live, minus, squares, C, N, WIDE, ROWS, COLS, STAGES
        )
    _store_projection(
        minus, squares, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
        N * C, EPS, SCALE, SINK_EPS, N, NP, ITERATIONS, True, PARTS, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def coefficients(
    projection_ptr, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr, S,
    SCALE: tl.constexpr, SINK_EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < S
    q = tl.arange(0, NP * NP)
    i, j = q // NP, q % NP
    base = projection_ptr + rows.to(tl.int64)[:, None] * (N * (N + 2))
    res = tl.load(base + (2 * N + i * N + j)[None, :], mask=live[:, None] & ((i < N) & (j < N))[None, :], other=0.0)
    ends_column = tl.where(q < NP, q, q - NP + N)
    is_end = (q < N) | ((q >= NP) & (q < NP + N))
    ends = tl.load(base + ends_column[None, :], mask=live[:, None] & is_end[None, :], other=0.0)
    _store_coefficients(
        res, ends, rows, live, out_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, bias_pre_ptr, bias_post_ptr, bias_res_ptr,
        SCALE, SINK_EPS, N, NP, ITERATIONS, ROWS,
    )  # fmt: skip
