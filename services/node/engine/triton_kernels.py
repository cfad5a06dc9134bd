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


@triton.jit
def draw_token(logits, numbers, drawn, vocab, TILE: tl.constexpr):
    """Draws a token from a row of logits [rows, vocab], after the cuts by min-p, top-k and top-p.
    One program for each draw.

    numbers [draws, 6] float64: the row, its temperature, min_p, top_k (`vocab` for all), top_p and
    the random number in [0, 1). drawn [draws] int64.

    Every cut is a border: what is above stays, and of the tokens that equal it the first ones do.
    Borders are found by search among the logits' bits (`_border`), in place of a sort.
    """
    own = numbers + tl.program_id(0) * 6
    row = logits + tl.load(own).to(tl.int64) * vocab
    temperature = tl.maximum(tl.load(own + 1).to(tl.float32), 1e-30)
    min_p = tl.load(own + 2).to(tl.float32)
    top_k, top_p, chance = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    i = tl.arange(0, TILE)

    most = tl.full([TILE], float("-inf"), tl.float32)
    for at in tl.range(0, vocab, TILE, num_stages=3):
        most = tl.maximum(most, tl.load(row + at + i, mask=at + i < vocab, other=float("-inf")))
    highest = tl.max(most, 0)
    # What is drawn from a row of infinite numbers is not used.
    highest = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)

    border = tl.full([], -(1 << 31), tl.int64)
    if top_k < vocab:
        border = _border(
            row, vocab, highest, temperature, min_p, border, top_k, COUNTED=True, TILE=TILE
        )
    above, above_weight, equal, weight = _divided(
        row, vocab, highest, temperature, min_p, border, TILE=TILE
    )
    room = tl.minimum(equal, tl.maximum(top_k - above, 0.0))
    total = above_weight + room * weight
    if top_p < 1.0:
        cut, share = border, tl.maximum(top_p * total, 1e-30)  # at least the best token stays
        # Tokens that weigh less than this do not weigh 1 - top_p together.
        light = (0.5 * (1.0 - top_p) * total / vocab).to(tl.float32)
        least = _key(highest + temperature * tl.log(light)).to(tl.int64)
        border = _border(
            row, vocab, highest, temperature, min_p, tl.maximum(cut, least), share,
            COUNTED=False, TILE=TILE,
        )  # fmt: skip
        above, above_weight, equal, weight = _divided(
            row, vocab, highest, temperature, min_p, border, TILE=TILE
        )
        # The fewest that reach the share; never more than top-k leaves.
        fewest = tl.ceil((share - above_weight) / weight)
        room = tl.minimum(fewest, tl.where(border == cut, room, equal))
        total = above_weight + room * weight

    target = chance * total
    found = tl.full([], -1, tl.int64)
    last = tl.full([], 0, tl.int64)
    before = tl.full([], 0.0, tl.float64)
    equals = tl.full([], 0.0, tl.float64)
    for at in range(0, vocab, TILE):
        if found < 0:
            keys, weights = _weighed(row, vocab, at, highest, temperature, min_p, TILE=TILE)
            same = keys == border
            there = tl.sum(same.to(tl.float32), 0).to(tl.float64)
            left = room - equals
            if left < there:  # not all of them
                late = tl.cumsum(same.to(tl.float32), 0) > left.to(tl.float32)
                weights = tl.where(same & late, 0.0, weights)
            weights = tl.where(keys >= border, weights, 0.0)
            sum = tl.sum(weights, 0).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(weights > 0, at + i, 0), 0).to(tl.int64))
            if before + sum > target:
                reached = tl.cumsum(weights, 0).to(tl.float64) + before > target
                token = tl.min(tl.where(reached & (weights > 0), at + i, vocab), 0).to(tl.int64)
                found = tl.where(token < vocab, token, found)
            before += sum
            equals += there
    # Rounding may have the number reach the total.
    tl.store(drawn + tl.program_id(0), tl.where(found < 0, last, found))


@triton.jit
def _key(logit):
    """An int32 in the order of the numbers."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # Negative numbers, other than integers, are larger the smaller the rest of their bits is.
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weighed(row, vocab, at, highest, temperature, min_p, TILE: tl.constexpr):
    """The keys and weights of a tile. The highest logit weighs 1; less than min_p is 0. What is not
    there has the least key."""
    i = at + tl.arange(0, TILE)
    logit = tl.load(row + i, mask=i < vocab, other=float("-inf"))
    weights = tl.exp((logit - highest) / temperature)
    keys = tl.where(i < vocab, _key(logit), -(1 << 31))
    return keys, tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _border(
    row, vocab, highest, temperature, min_p, least, goal, COUNTED: tl.constexpr, TILE: tl.constexpr
):
    """The largest key from `least` on, such that the tokens with this key or larger ones are at
    least `goal` (COUNTED), or weigh that much. Each pass leaves a quarter of the range."""
    low, high = least, tl.full([], 1 << 31, tl.int64)
    while high - low > 1:
        step = (high - low + 3) // 4
        first = tl.minimum(low + step, (1 << 31) - 1).to(tl.int32)
        second = tl.minimum(low + 2 * step, (1 << 31) - 1).to(tl.int32)
        third = tl.minimum(low + 3 * step, (1 << 31) - 1).to(tl.int32)
        from_first = tl.zeros([TILE], tl.float32)
        from_second = tl.zeros([TILE], tl.float32)
        from_third = tl.zeros([TILE], tl.float32)
        for at in tl.range(0, vocab, TILE, num_stages=3):
            keys, weights = _weighed(row, vocab, at, highest, temperature, min_p, TILE=TILE)
            if COUNTED:
                weights = tl.full([TILE], 1.0, tl.float32)
            from_first += tl.where(keys >= first, weights, 0.0)
            from_second += tl.where(keys >= second, weights, 0.0)
            from_third += tl.where(keys >= third, weights, 0.0)
        passed = (tl.sum(from_first, 0).to(tl.float64) >= goal).to(tl.int64)
        passed += (tl.sum(from_second, 0).to(tl.float64) >= goal).to(tl.int64)
        passed += (tl.sum(from_third, 0).to(tl.float64) >= goal).to(tl.int64)
        low = low + step * passed
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _divided(row, vocab, highest, temperature, min_p, border, TILE: tl.constexpr):
    """(number and weight of the tokens above the border, number of those on it, weight of one)."""
    above = tl.zeros([TILE], tl.float32)
    above_weight = tl.zeros([TILE], tl.float32)
    equal = tl.zeros([TILE], tl.float32)
    one = tl.zeros([TILE], tl.float32)
    for at in tl.range(0, vocab, TILE, num_stages=3):
        keys, weights = _weighed(row, vocab, at, highest, temperature, min_p, TILE=TILE)
        over, on = keys > border, keys == border
        above += over.to(tl.float32)
        above_weight += tl.where(over, weights, 0.0)
        equal += on.to(tl.float32)
        one = tl.maximum(one, tl.where(on, weights, 0.0))
    return (
        tl.sum(above, 0).to(tl.float64),
        tl.sum(above_weight, 0).to(tl.float64),
        tl.sum(equal, 0).to(tl.float64),
        tl.max(one, 0).to(tl.float64),
    )


@triton.jit
def multiply_row(
    x,
    norm,
    eps,
    weight,
    bias,
    out,
    width,
    columns,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The product of one row with a matrix, and what comes before and after it. Its time is that of
    reading the matrix. One program for each COLUMNS outputs.

    x [width]; weight [columns, width], or if GATED [2 x columns, width], the gates first; bias [the
    same length], if BIASED; out [columns]. NORMED: of x's RMS norm, times norm [width]; the scale
    is applied to the sums, since it is known only once the whole row was read. GATED: silu(gate)
    times the other. ADDED: the product is added to what is in `out`. EVEN: width and columns are
    multiples of DEPTH and COLUMNS. DEPTH of the width are read at a time, and
    STAGES ahead.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = weight + column[:, None].to(tl.int64) * width
    beside = tl.cast(columns, tl.int64) * width
    summed = tl.zeros([COLUMNS, DEPTH], tl.float32)
    second = tl.zeros([COLUMNS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for done in tl.range(0, width, DEPTH, num_stages=STAGES):
        d = done + tl.arange(0, DEPTH)
        if EVEN:
            a = tl.load(x + d).to(tl.float32)
            w = tl.load(matrix + d[None, :]).to(tl.float32)
        else:
            there = (column < columns)[:, None] & (d < width)[None, :]
            a = tl.load(x + d, mask=d < width, other=0.0).to(tl.float32)
            w = tl.load(matrix + d[None, :], mask=there, other=0.0).to(tl.float32)
        if NORMED:
            squares += a * a
            a = a * tl.load(norm + d, mask=d < width, other=0.0).to(tl.float32)
        summed += w * a[None, :]
        if GATED:
            if EVEN:
                v = tl.load(matrix + beside + d[None, :]).to(tl.float32)
            else:
                v = tl.load(matrix + beside + d[None, :], mask=there, other=0.0).to(tl.float32)
            second += v * a[None, :]
    total = tl.sum(summed, 1)
    other = tl.sum(second, 1)
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        total = total * scale
        other = other * scale
    own = column < columns
    if BIASED:
        total += tl.load(bias + column, mask=own, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            other += tl.load(bias + columns + column, mask=own, other=0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * other
    if ADDED:
        total += tl.load(out + column, mask=own, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=own)
