"""Device code of sampling: scores by hash, partial maxima, and the choice among filtered candidates.

The ids that pass top-k, top-p and min-p are a prefix of the ids in falling order of logit, so a row needs
only those above a bound that surely includes the prefix; these few are sorted in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _noise(seed, position, ids):
    """Return the Gumbel noise of each id, as the contract says."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = (position & 0xFFFFFFFF).to(tl.uint32) * 0x85EBCA6B
    h = _mix(low ^ 0x9E3779B9)
    h = _mix(h ^ high ^ place.to(tl.uint32))
    h = _mix(h + ids.to(tl.uint32))
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    return -tl.log(-tl.log(u))


@triton.jit
def _scaled(logits_ptr, row, ids, temperature, V):
    """Return logits over temperature in float32 (a temperature of 0 counts as 1); -inf past V and for NaN."""
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def _argmax(scores, ids):
    """Return the largest score and its lowest id."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _token(score, token):
    """Return the token as int64, -1 where its score says that the largest logit is not finite: noise always is."""
    return tl.where(tl.abs(score) < float("inf"), token, -1).to(tl.int64)


@triton.jit
def tile_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr,
    best_ptr, best_id_ptr, max_ptr, total_ptr,
    V, NUM_TILES, BLOCK: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Write each tile's best score and id; for filters also its largest logit and its sum of exponentials."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    x = _scaled(logits_ptr, row, ids, temperature, V)
    scores = x
    if temperature != 0.0:
        scores = x + _noise(tl.load(seed_ptr + row), tl.load(position_ptr + row), ids)
    best, best_id = _argmax(scores, ids)
    place = row * NUM_TILES + tile
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, best_id)
    if IS_FILTERED:
        largest = tl.max(x, axis=0)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(max_ptr + place, largest)
        tl.store(total_ptr + place, tl.sum(tl.exp(x - safe).to(tl.float64), axis=0))


@triton.jit
def reduce_kernel(best_ptr, best_id_ptr, tokens_ptr, NUM_TILES, TILES: tl.constexpr):
    """Write the best id over all tiles of a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_in = tile < NUM_TILES
    best = tl.load(best_ptr + row * NUM_TILES + tile, mask=is_in, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * NUM_TILES + tile, mask=is_in, other=0x7FFFFFFF)
    score, chosen = _argmax(best, ids)
    tl.store(tokens_ptr + row, _token(score, chosen))


@triton.jit
def _row_stats(max_ptr, total_ptr, row, NUM_TILES, TILES: tl.constexpr):
    """Return the largest logit of a row and the sum of exponentials relative to it (float64)."""
    tile = tl.arange(0, TILES)
    is_in = tile < NUM_TILES
    largest = tl.load(max_ptr + row * NUM_TILES + tile, mask=is_in, other=float("-inf"))
    total = tl.load(total_ptr + row * NUM_TILES + tile, mask=is_in, other=0.0)
    top = tl.max(largest, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe, tl.sum(total * tl.exp((largest - safe).to(tl.float64)), axis=0)


@triton.jit
def _depths(BOUNDS: tl.constexpr):
    """Return how far below the largest logit the bounds lie: 0.25 to 1024, by steps of about 1.3."""
    return 0.25 * tl.exp2(tl.arange(0, BOUNDS).to(tl.float32) * (12.0 / (BOUNDS - 1)))


@triton.jit
def count_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, total_ptr,
    count_ptr, mass_ptr, V, NUM_TILES, TILES: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Write, per tile and bound, how many ids lie above the bound and their sum of exponentials."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    is_free = (tl.load(top_k_ptr + row) <= 0) & (tl.load(top_p_ptr + row) >= 1.0)
    is_free = is_free & (tl.load(min_p_ptr + row) <= 0.0)
    if (temperature != 0.0) & (is_free == 0):
        top, _ = _row_stats(max_ptr, total_ptr, row, NUM_TILES, TILES)
        bounds = top - _depths(BOUNDS)
        counts = tl.zeros([CHUNK, BOUNDS], tl.int32)
        masses = tl.zeros([CHUNK, BOUNDS], tl.float32)
        for first in range(0, BLOCK, CHUNK):
            ids = tile * BLOCK + first + tl.arange(0, CHUNK)
            x = _scaled(logits_ptr, row, ids, temperature, V)
            is_above = x[:, None] > bounds[None, :]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(x - top)[:, None], 0.0)
        place = (row * NUM_TILES + tile) * BOUNDS + tl.arange(0, BOUNDS)
        tl.store(count_ptr + place, tl.sum(counts, axis=0))
        tl.store(mass_ptr + place, tl.sum(masses, axis=0))


@triton.jit
def list_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, total_ptr,
    count_ptr, mass_ptr, list_ptr, list_id_ptr, length_ptr,
    V, NUM_TILES, TILES: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """List the logits and ids above a bound that no kept id lies below, in order of id.

    The bound is the highest with top-k ids or the top-p mass above it; without one all ids are listed.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_free = (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)
    if (temperature != 0.0) & (is_free == 0):
        top, total = _row_stats(max_ptr, total_ptr, row, NUM_TILES, TILES)
        bound_number = tl.arange(0, BOUNDS)
        place = (row * NUM_TILES + tl.arange(0, TILES)[:, None]) * BOUNDS + bound_number[None, :]
        is_in = (tl.arange(0, TILES) < NUM_TILES)[:, None]
        counts = tl.load(count_ptr + place, mask=is_in, other=0)
        masses = tl.load(mass_ptr + place, mask=is_in, other=0.0)
        count = tl.sum(counts, axis=0)
        mass = tl.sum(masses, axis=0)
        depth = _depths(BOUNDS)
        # Top-p after top-k is a share of the mass of all top-k ids, so these must all be listed. 1e-4 is far
        # above the rounding of these float32 sums: the bound never cuts a kept id off.
        needs_top_k = (top_k > 0) & (top_p < 1.0)
        count_wanted = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
        mass_wanted = (total * top_p * 1.0001).to(tl.float32)
        mass_wanted = tl.where((top_p < 1.0) & (top_k <= 0), mass_wanted, float("inf"))
        floor = tl.where(needs_top_k, 0.0, min_p * 0.9999)
        is_enough = (count >= count_wanted) | (mass >= mass_wanted) | (tl.exp(-depth) < floor)
        chosen = tl.min(tl.where(is_enough, bound_number, BOUNDS), axis=0)
        depth_chosen = tl.sum(tl.where(bound_number == chosen, depth, 0.0), axis=0)
        # Nothing compares with NaN: without a bound even -inf is listed.
        bound = tl.where(chosen < BOUNDS, top - depth_chosen, float("nan"))
        before = (tl.arange(0, TILES) < tile)[:, None] & (bound_number == chosen)[None, :]
        start = tl.sum(tl.sum(tl.where(before, counts, 0), axis=0), axis=0)
        start = tl.where(chosen < BOUNDS, start, tile * BLOCK)
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(logits_ptr, row, ids, temperature, V)
        is_listed = (ids < V) & ((x <= bound) == 0)
        rank = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        target = row * V + start + rank
        tl.store(list_ptr + target, x, mask=is_listed)
        tl.store(list_id_ptr + target, ids, mask=is_listed)
        if tile == NUM_TILES - 1:
            tl.store(length_ptr + row, start + tl.sum(is_listed.to(tl.int32), axis=0))


@triton.jit
def _order(x):
    """Return uint32 keys that rise with float32 values; both zeros are equal."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(key):
    """Undo `_order`."""
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _choose_sorted(
    list_ptr, list_id_ptr, row, length, V, top, total, top_k, top_p, min_p, seed, position,
    CAP: tl.constexpr,
):  # fmt: skip
    """Choose among at most CAP candidates: sort by falling logit, then rising id, and keep a prefix."""
    i = tl.arange(0, CAP)
    is_in = i < length
    x = tl.load(list_ptr + row * V + i, mask=is_in, other=float("-inf"))
    ids = tl.load(list_id_ptr + row * V + i, mask=is_in, other=0x7FFFFFFF)
    packed = (_order(x).to(tl.uint64) << 32) | (0xFFFFFFFF - ids.to(tl.uint64))
    packed = tl.sort(packed, descending=True)
    x = _value((packed >> 32).to(tl.uint32))
    ids = (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
    p = tl.exp((x - top).to(tl.float64))
    is_top = is_in & (i < tl.where(top_k > 0, top_k, 0x7FFFFFFF))
    norm = tl.where(top_k > 0, tl.sum(tl.where(is_top, p, 0.0), axis=0), total)
    before = tl.cumsum(p, axis=0) - p
    is_kept = is_top & (before < top_p.to(tl.float64) * norm) & (p >= min_p.to(tl.float64))
    scores = tl.where(is_kept, x + _noise(seed, position, ids), float("-inf"))
    _, chosen = _argmax(scores, tl.where(is_kept, ids, 0x7FFFFFFF))
    return chosen


@triton.jit
def _above(list_ptr, row, length, V, key, top, BLOCK: tl.constexpr):
    """Return how many candidates have larger keys, and their sum of exponentials (float64)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(list_ptr + row * V + i, mask=i < length, other=float("-inf"))
        is_above = (_order(x) > key) & (i < length)
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((x - top).to(tl.float64)), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _last_kept(list_ptr, row, length, V, top, top_k, limit, BLOCK: tl.constexpr):
    """Find the lowest key whose first holder is kept, by bisection, and how many of its holders are.

    An id is kept while fewer than top_k ids (if top_k > 0) and less than `limit` mass lie before it.
    Returns  key;  number kept of those that hold it;  mass of all kept
    """
    low = tl.full([], 0, tl.uint32)
    high = _order(top)
    while low < high:
        middle = low + (high - low) // 2
        count, mass = _above(list_ptr, row, length, V, middle, top, BLOCK)
        is_kept = ((count < top_k) | (top_k <= 0)) & (mass < limit)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle + 1)
    count, mass = _above(list_ptr, row, length, V, high, top, BLOCK)
    p = tl.exp((_value(high) - top).to(tl.float64))
    ties = tl.where(top_k > 0, top_k - count, 0x7FFFFFFF)
    by_mass = tl.ceil((limit - mass) / p)
    ties = tl.where(by_mass < ties.to(tl.float64), by_mass.to(tl.int32), ties)
    here, _ = _above(list_ptr, row, length, V, high - 1, top, BLOCK)
    ties = tl.minimum(ties, here - count)
    return high, ties, mass + ties.to(tl.float64) * p


@triton.jit
def _choose_bisected(
    list_ptr, list_id_ptr, row, length, V, top, total, top_k, top_p, min_p, seed, position,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose among any number of candidates: find the last kept logit first, then take the best score."""
    norm = total
    endless = total * 2.0 + 1.0
    if top_k > 0:
        _, _, norm = _last_kept(list_ptr, row, length, V, top, top_k, endless, BLOCK)
    limit = tl.where(top_p < 1.0, top_p.to(tl.float64) * norm, endless)
    key, ties, _ = _last_kept(list_ptr, row, length, V, top, top_k, limit, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0x7FFFFFFF, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for first in range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(list_ptr + row * V + i, mask=i < length, other=float("-inf"))
        ids = tl.load(list_id_ptr + row * V + i, mask=i < length, other=0x7FFFFFFF)
        order = _order(x)
        is_tie = (order == key) & (i < length)
        rank = seen + tl.cumsum(is_tie.to(tl.int32), axis=0) - 1
        is_kept = ((order > key) | (is_tie & (rank < ties))) & (i < length)
        is_kept = is_kept & (tl.exp((x - top).to(tl.float64)) >= min_p.to(tl.float64))
        seen += tl.sum(is_tie.to(tl.int32), axis=0)
        scores = tl.where(is_kept, x + _noise(seed, position, ids), float("-inf"))
        here, here_id = _argmax(scores, tl.where(is_kept, ids, 0x7FFFFFFF))
        best_id = tl.where(here > best, here_id, best_id)
        best = tl.maximum(here, best)
    return best_id


@triton.jit
def choose_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, max_ptr, total_ptr,
    best_ptr, best_id_ptr, list_ptr, list_id_ptr, length_ptr, tokens_ptr,
    V, NUM_TILES, TILES: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the token of each row: from its tiles where nothing is filtered, else from its candidates."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_free = (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)
    tile = tl.arange(0, TILES)
    is_in = tile < NUM_TILES
    best = tl.load(best_ptr + row * NUM_TILES + tile, mask=is_in, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * NUM_TILES + tile, mask=is_in, other=0x7FFFFFFF)
    score, unfiltered = _argmax(best, ids)
    if (temperature == 0.0) | is_free:
        tl.store(tokens_ptr + row, _token(score, unfiltered))
    else:
        top, total = _row_stats(max_ptr, total_ptr, row, NUM_TILES, TILES)
        length = tl.load(length_ptr + row)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        if length <= CAP:
            chosen = _choose_sorted(
                list_ptr, list_id_ptr, row, length, V, top, total, top_k, top_p, min_p, seed,
                position, CAP,
            )  # fmt: skip
            tl.store(tokens_ptr + row, _token(score, chosen))
        else:
            chosen = _choose_bisected(
                list_ptr, list_id_ptr, row, length, V, top, total, top_k, top_p, min_p, seed,
                position, BLOCK,
            )  # fmt: skip
            tl.store(tokens_ptr + row, _token(score, chosen))
