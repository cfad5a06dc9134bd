"""Triton kernels for GPUs, for what torch has no fused call. `triton_ops.py` launches them.

On a machine without a GPU only tests import this file: they run it in Triton's interpreter. All
sums are in float32, and float32 operands are multiplied as such, not as TF32.

Arguments that differ from step to step are not specialised on. A kernel compiled anew in the middle
of serving would make everybody wait for seconds.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_and_store(
    qkv,
    norm,
    eps,
    positions,
    frequencies,
    slots,
    kv,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Applies RoPE to a row's queries, in place, and to its keys, which go to the row's slot of the
    cache together with its values. NORMED: after an RMS norm of each head. One program for each row
    and TILE of its heads (queries', keys', values').

    qkv [rows, HEADS + 2 KV_HEADS, HEAD_DIM]; norm [HEADS + KV_HEADS, HEAD_DIM]; positions [rows];
    frequencies [HEAD_DIM / 2] float32, see rope.inverse_frequencies; slots [rows], less than 0 for
    rows that only pad; kv [slots, 2, KV_HEADS, HEAD_DIM]. HALF: a power of two that is at least
    HEAD_DIM / 2. Dimension i is paired with i + HEAD_DIM / 2.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < half)[None, :]
    turns = (head < HEADS + KV_HEADS)[:, None]
    own = head[:, None] * HEAD_DIM + i[None, :]
    low = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + own
    a = tl.load(low, mask=there, other=0.0).to(tl.float32)
    b = tl.load(low + half, mask=there, other=0.0).to(tl.float32)
    position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(frequencies + i, mask=i < half, other=0.0)
    c, s = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        w = tl.load(norm + own, mask=there & turns, other=0.0).to(tl.float32)
        a = tl.where(turns, a * scale * w, a)
        w = tl.load(norm + own + half, mask=there & turns, other=0.0).to(tl.float32)
        b = tl.where(turns, b * scale * w, b)
    x = tl.where(turns, a * c - b * s, a).to(qkv.dtype.element_ty)
    y = tl.where(turns, b * c + a * s, b).to(qkv.dtype.element_ty)
    query = (head < HEADS)[:, None]
    tl.store(low, x, mask=there & query)
    tl.store(low + half, y, mask=there & query)
    place = kv + slot * (2 * KV_HEADS * HEAD_DIM) - HEADS * HEAD_DIM + own
    cached = there & (head >= HEADS)[:, None] & (slot >= 0)
    tl.store(place, x, mask=cached)
    tl.store(place + half, y, mask=cached)


@triton.jit(do_not_specialize_on_alignment=["tiles", "pages"])
def attend(
    qkv,
    kv,
    out,
    partial,
    weight,
    tiles,
    pages,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Causal attention of a tile's queries over the pages of its sequence, with an online softmax
    (FlashAttention-2: Dao 2023, algorithm 1). The keys are divided over the grid's third dimension
    (Flash-Decoding: Dao et al. 2023), and heads that share a KV head are folded into the rows, so
    that their KV is read once. One program for each (tile, KV head, split).

    tiles [n, 4] int32: the tile's first row of qkv and `out`, its number of rows (at most ROWS x
    KV_HEADS / HEADS), the position of the first row (both are 0 for a tile that only pads), and
    where its sequence's page numbers begin in `pages`. scale: the scale of the scores, times
    log2(e). WINDOW: number of keys that a query sees, 0 for all. KEYS: how many are read at a time.
    DIM: at least HEAD_DIM. KEYS, DIM and ROWS are powers of two.

    The result goes to `out` [rows, HEADS, HEAD_DIM]. If DIVIDED, each split's result goes to
    `partial` [n, KV_HEADS, ROWS, splits, HEAD_DIM] and log2 of its weight to `weight` [n, KV_HEADS,
    ROWS, splits], for `combine`.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    first = tl.load(tiles + tile * 4 + 2)
    table = pages + tl.load(tiles + tile * 4 + 3)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    own = r // group < count
    mask = own[:, None] & (d < HEAD_DIM)[None, :]
    at = head * group + r % group
    q_row: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    q = tl.load(
        qkv + (row + r // group)[:, None] * q_row + at[:, None] * HEAD_DIM + d[None, :],
        mask=mask,
        other=0.0,
    )
    position = first + r // group

    stop = first + count
    start = 0
    if WINDOW:
        start = tl.maximum(first + 1 - WINDOW, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(stop - start, KEYS), splits) * KEYS
    begin = start + split * share
    end = tl.minimum(begin + share, stop)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    for n in range(begin, end, KEYS):
        key = n + tl.arange(0, KEYS)
        here = key < stop
        page = tl.load(table + key // PAGE, mask=here, other=0).to(tl.int64)
        place = (page * PAGE + key % PAGE) * (2 * KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        k = tl.load(
            kv + place[None, :] + d[:, None],
            mask=here[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        seen = (key[None, :] <= position[:, None]) & own[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key yet has -inf as its maximum, and -inf - -inf is NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - base[:, None])
        kept = tl.exp2(best - base)
        v = tl.load(
            kv + (place + KV_HEADS * HEAD_DIM)[:, None] + d[None, :],
            mask=here[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(p, 1)
        summed = summed * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = highest

    total = tl.where(total > 0, total, 1.0)  # without any key here, `best` is -inf and says so
    summed = summed / total[:, None]
    if not DIVIDED:
        target = out + (row + r // group)[:, None] * (HEADS * HEAD_DIM)
        target = target + at[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, summed.to(out.dtype.element_ty), mask=mask)
    else:
        part = ((tile * KV_HEADS + head) * ROWS + r) * splits + split
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], summed, mask=mask)
        tl.store(weight + part, best + tl.log2(total), mask=own)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tiles"])
def combine(
    partial,
    weight,
    out,
    tiles,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Combines the results of the splits of `attend`, by weight. One program for each (tile, KV
    head, row)."""
    tile, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    if r // group < tl.load(tiles + tile * 4 + 1):
        row = tl.load(tiles + tile * 4).to(tl.int64) + r // group
        s = tl.arange(0, MOST_SPLITS)
        d = tl.arange(0, DIM)
        part = ((tile * KV_HEADS + head) * ROWS + r) * splits + s
        w = tl.load(weight + part, mask=s < splits, other=float("-inf"))
        share = tl.exp2(w - tl.max(w, 0))
        found = tl.load(
            partial + part[:, None] * HEAD_DIM + d[None, :],
            mask=(s < splits)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        mean = tl.sum(found * share[:, None], 0) / tl.sum(share, 0)
        target = out + row * (HEADS * HEAD_DIM) + (head * group + r % group) * HEAD_DIM + d
        tl.store(target, mean.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def rms_norm(x, weight, out, eps, width, TILE: tl.constexpr):
    """out [rows, width] = RMS norm of each row of x [rows, width], times weight [width]. One
    program for each row. TILE: a power of two that is at least the width."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    value = tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32)
    factor = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor
    tl.store(out + row * width + i, scaled.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def silu_times(gate_up, out, width, TILE: tl.constexpr):
    """out [rows, width] = silu(first half of gate_up [rows, 2 x width]) times its second half."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + i, active.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def multiply_by_expert(
    x,
    weight,
    out,
    order,
    ends,
    width,
    columns,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiplies pairs (a row, one of its experts) by the matrix of the pair's expert: a grouped
    product as in vLLM's fused_moe, without its padding. One program for each expert and COLUMNS of
    its matrix; programs of experts that no row chose end at once.

    x [pairs / SHARE, width]: pair i has row i // SHARE; weight [experts, columns, width]; out
    [pairs, columns]. order [pairs]: pairs, sorted by expert; ends [experts]: where the pairs of
    each expert end in `order`. ROWS pairs and DEPTH of the width are multiplied at a time.
    """
    expert = tl.program_id(0)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = weight + (expert.to(tl.int64) * columns + column[None, :]) * width
    for first in range(start, stop, ROWS):
        place = first + tl.arange(0, ROWS)
        pair = tl.load(order + place, mask=place < stop, other=0)
        summed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for done in range(0, width, DEPTH):
            d = done + tl.arange(0, DEPTH)
            a = tl.load(
                x + (pair // SHARE)[:, None] * width + d[None, :],
                mask=(place < stop)[:, None] & (d < width)[None, :],
                other=0.0,
            )
            b = tl.load(
                matrix + d[:, None],
                mask=(column < columns)[None, :] & (d < width)[:, None],
                other=0.0,
            )
            summed += tl.dot(a, b, input_precision="ieee")
        target = out + pair[:, None] * columns + column[None, :]
        there = (place < stop)[:, None] & (column < columns)[None, :]
        tl.store(target, summed.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x,
    norm,
    eps,
    weight,
    bias,
    out,
    rows,
    width,
    columns,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A product of few rows with a matrix, and what comes before and after it. Its time is that of
    reading the matrix. One program for each COLUMNS outputs.

    x [rows, width]; weight [columns, width], or if GATED [2 x columns, width], the gates first;
    bias [the same length], if BIASED; out [rows, columns]. NORMED: of x's RMS norm, times norm
    [width]; a row's scale is applied to its sums, since it is known only once the whole row was
    read. GATED: silu(gate) times the other. ADDED: the product is added to what is in `out`.
    EVEN: width and columns are multiples of DEPTH and COLUMNS. ROWS: a power of two that is at
    least `rows`.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    matrix = weight + column[:, None].to(tl.int64) * width
    beside = columns.to(tl.int64) * width
    summed = tl.zeros([COLUMNS, ROWS], tl.float32)
    second = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for done in range(0, width, DEPTH):
        d = done + tl.arange(0, DEPTH)
        wanted, there = (r < rows)[None, :], (column < columns)[:, None]
        if not EVEN:
            wanted = wanted & (d < width)[:, None]
            there = there & (d < width)[None, :]
        a = tl.load(x + r[None, :] * width + d[:, None], mask=wanted, other=0.0)
        if EVEN:
            w = tl.load(matrix + d[None, :])
        else:
            w = tl.load(matrix + d[None, :], mask=there, other=0.0)
        if NORMED:
            value = a.to(tl.float32)
            squares += tl.sum(value * value, 0)
            factor = tl.load(norm + d, mask=d < width, other=0.0).to(tl.float32)
            a = (value * factor[:, None]).to(x.dtype.element_ty)
        summed += tl.dot(w, a, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(matrix + beside + d[None, :])
            else:
                w = tl.load(matrix + beside + d[None, :], mask=there, other=0.0)
            second += tl.dot(w, a, input_precision="ieee")
    if NORMED:
        scale = tl.rsqrt(squares / width + eps)[None, :]
        summed = summed * scale
        second = second * scale
    if BIASED:
        summed += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIASED:
            other = tl.load(bias + columns + column, mask=column < columns, other=0.0)
            second += other.to(tl.float32)[:, None]
        summed = summed / (1.0 + tl.exp(-summed)) * second
    target = out + r[None, :] * columns + column[:, None]
    own = (r < rows)[None, :] & (column < columns)[:, None]
    if ADDED:
        summed += tl.load(target, mask=own, other=0.0).to(tl.float32)
    tl.store(target, summed.to(out.dtype.element_ty), mask=own)
