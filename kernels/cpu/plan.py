"""Cuts one ragged batch of attention into work items.

Owns what an item is. Knows nothing of queries, keys or threads.

An item is a tile of query rows against a range of keys; its rows belong to one or several members. A member is a run of
tokens of one sequence, each with the query heads that share a KV head:

- Of a long chunk, up to `CHUNK_ROWS` rows against all keys that they see; alone in its item.
- Of a sequence with up to `TILE_ROWS` (a decode, a short chunk), all rows against a part of its keys, cut at
  multiples of `SPLIT_KEYS`; the parts are merged as in Flash-Decoding (Dao and others, 2023).

Short sequences whose block tables begin alike come into one item, which reads the keys that they share once for all.
Nobody has to say what is shared: the sequences are put in the order of their tables, where those that share most stand
side by side, and each member says up to which key it goes together with the one before, as in a suffix array.

Where a sequence's keys are cut depends on that sequence alone, and every row takes the same keys in the same tiles,
whoever is with it in the item: neither the batch nor the number of threads changes a row's result by one bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.kernels.cpu.lanes import whole_lanes
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import WIDTH
from octavo.kernels.cpu.tiles import FEW_ROWS, key_tile_blocks

TILE_ROWS = 48
"""Query rows of a short sequence, at most, unless one token has more heads than that on one KV head; of a tile of rows
that are few in each sequence; and of a long chunk's tiles where larger ones would be too few for the threads."""
CHUNK_ROWS = 192
"""Query rows of a tile of a long chunk, at most, and of an item of short chunks that share keys. Keys are brought
together once a tile."""
SPLIT_KEYS = 512
"""Keys of an item of a short sequence, in whole key tiles."""
COMPARED = 16
"""Entries of two block tables that are compared at once."""

# Columns of the item table: its members, its first key, and whether its rows are few in each sequence (see
# `tiles.FEW_ROWS`).
FIRST, END, KEY_BEGIN, FEW = range(4)
ITEM_FIELDS = 4
# Columns of the member table: sequence, its first row of queries, its tokens, their first position, the end of the
# keys, the row of the tile at which it begins, the key up to which it goes together with the member before, and the
# first row of its part, -1 where its keys are not cut.
SEQ, TOKEN, NUM_TOKENS, POSITION, KEY_END, ROW, TOGETHER, PART = range(8)
MEMBER_FIELDS = 8


@compiled()
def tile_tokens(group: int) -> int:
    """Tokens of a tile, from the query heads on each KV head."""
    return max(1, TILE_ROWS // group)


@compiled()
def first_key(context: int, tokens: int, window: int) -> int:
    """The first key that any of the last `tokens` of a sequence sees."""
    return 0 if window <= 0 else max(0, context - tokens - window + 1)


@compiled()
def check_batch(
    block_tables: Any, cu_seqlens_q: Any, context_lens: Any, num_blocks: int, block_size: int, window: int
) -> None:
    """Raises ValueError where the batch names a block or a length that cannot be, before anything is read."""
    for s in range(context_lens.shape[0]):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        context = context_lens[s]
        if tokens < 0 or tokens > context:
            raise ValueError("a sequence has more rows than context, or cu_seqlens_q falls")
        blocks = (context + block_size - 1) // block_size
        if blocks > block_tables.shape[1]:
            raise ValueError("a block table is shorter than its context")
        if tokens > 0:
            for i in range(first_key(context, tokens, window) // block_size, blocks):
                if block_tables[s, i] < 0 or block_tables[s, i] >= num_blocks:
                    raise ValueError("a block table names a block outside the cache")


@compiled()
def leading_blocks(block_tables: Any, visible: Any, s: int, t: int) -> int:
    """With how many equal entries the tables begin, of the first visible[s] and visible[t]."""
    most = min(visible[s], visible[t])
    a, b = block_tables[s], block_tables[t]
    i = 0
    # A loop that may stop at any entry is not made of vectors; tables that share nothing stop at the first.
    while i + COMPARED <= most and a[i] == b[i]:
        differences = np.int32(0)
        for j in range(i, i + COMPARED):
            differences |= a[j] ^ b[j]
        if differences != 0:
            break
        i += COMPARED
    while i < most and a[i] == b[i]:
        i += 1
    return i


@compiled()
def in_order(block_tables: Any, visible: Any, sequences: Any) -> tuple[Any, Any]:
    """`sequences` in the order of the first visible[s] entries of their tables, a beginning before what it begins, and
    int64 [n], with how many entries each begins like the one before, 0 for the first."""
    order = np.empty_like(sequences)
    for count in range(sequences.shape[0]):
        s = sequences[count]
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            t = order[middle]
            i = leading_blocks(block_tables, visible, s, t)
            if i < visible[t] and (i == visible[s] or block_tables[s, i] < block_tables[t, i]):
                high = middle
            else:
                low = middle + 1
        for i in range(count, low, -1):
            order[i] = order[i - 1]
        order[low] = s
    leading = np.zeros_like(order)
    for i in range(1, order.shape[0]):
        leading[i] = leading_blocks(block_tables, visible, order[i - 1], order[i])
    return order, leading


@compiled()
def set_item(items: Any, item: int, first: int, end: int, key_begin: int, few: bool) -> None:
    """One row of the item table."""
    items[item, FIRST] = first
    items[item, END] = end
    items[item, KEY_BEGIN] = key_begin
    items[item, FEW] = few


@compiled()
def set_member(
    members: Any, member: int, rows: tuple[Any, Any, Any, Any], keys: tuple[Any, Any, Any]
) -> None:
    """One row of the member table. rows = (sequence, first row of queries, tokens, first row of the tile); keys =
    (position, end, end of those read together); as if the keys were not cut."""
    members[member, SEQ] = rows[0]
    members[member, TOKEN] = rows[1]
    members[member, NUM_TOKENS] = rows[2]
    members[member, ROW] = rows[3]
    members[member, POSITION] = keys[0]
    members[member, KEY_END] = keys[1]
    members[member, TOGETHER] = keys[2]
    members[member, PART] = -1


@compiled()
def chunk_tokens(tokens: int, tokens_max: int, group: int) -> int:
    """Tokens of each tile of a long chunk: even shares of its tokens, up to about `tokens_max`, in whole vectors of
    rows."""
    tiles = (tokens + tokens_max - 1) // tokens_max
    taken = (tokens + tiles - 1) // tiles
    while taken * group % WIDTH != 0:
        taken += 1
    return taken


@compiled()
def add_long_chunks(
    cu_seqlens_q: Any, context_lens: Any, group: int, window: int, tokens_max: int, items: Any, members: Any
) -> int:
    """Items of the sequences with more rows than a short one; returns their number, which is that of their members.

    The last and heaviest tile of each comes first: what is left at the end is small.
    """
    count = 0
    for s in range(context_lens.shape[0]):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        if tokens <= tile_tokens(group):
            continue
        per_tile = chunk_tokens(tokens, tokens_max, group)
        for tile in range((tokens + per_tile - 1) // per_tile - 1, -1, -1):
            token = tile * per_tile
            taken = min(per_tile, tokens - token)
            position = context_lens[s] - tokens + token
            begin = first_key(position + taken, taken, window)
            set_item(items, count, count, count + 1, begin, False)
            rows = (s, cu_seqlens_q[s] + token, taken, 0)
            set_member(members, count, rows, (position, position + taken, begin))
            count += 1
    return count


@compiled()
def cut_keys(
    cu_seqlens_q: Any, context_lens: Any, group: int, window: int, split: int
) -> tuple[Any, int, int]:
    """int64 [S, 2]: of each short sequence the number of its parts and, if there are several, the first row of the
    first part among those of all; their rows in all; the rows of all items of short sequences."""
    cuts = np.zeros((context_lens.shape[0], 2), np.int64)
    part_rows, all_rows = 0, 0
    for s in range(context_lens.shape[0]):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        if not 0 < tokens <= tile_tokens(group):
            continue
        begin = first_key(context_lens[s], tokens, window)
        parts = (context_lens[s] + split - 1) // split - begin // split
        cuts[s, 0] = parts
        all_rows += parts * tokens * group
        if parts > 1:
            cuts[s, 1] = part_rows
            part_rows += parts * tokens * group
    return cuts, part_rows, all_rows


@compiled()
def short_sequences(cu_seqlens_q: Any, cuts: Any, group: int, few: bool) -> Any:
    """int64 [n]: those of no more rows than one tile, of few rows or of more."""
    found = np.empty(cuts.shape[0], np.int64)
    count = 0
    for s in range(cuts.shape[0]):
        rows = (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * group
        if cuts[s, 0] > 0 and (rows <= FEW_ROWS) == few:
            found[count] = s
            count += 1
    return found[:count]


@compiled()
def plan_items(
    block_tables: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    block_size: int,
    group: int,
    window: int,
    items_min: int,
) -> tuple[Any, Any, Any, int]:
    """int64 [N, 4] items, each for all KV heads; int64 [M, 8] members; int64 [S, 2] and the rows as of `cut_keys`.

    Members come together in so many items that, if there are rows enough, `items_min` are left.
    """
    key_tile = key_tile_blocks(block_size) * block_size
    split = max(1, SPLIT_KEYS // key_tile) * key_tile
    cuts, part_rows, all_rows = cut_keys(cu_seqlens_q, context_lens, group, window, split)
    # Rows of long chunks; their tiles are as large as leaves `items_min`.
    long_rows = 0
    for s in range(context_lens.shape[0]):
        if cuts[s, 0] == 0:
            long_rows += (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) * group
    per_tile = min(max(1, CHUNK_ROWS // group), max(tile_tokens(group), long_rows // items_min // group))
    # Whole blocks that all rows of a sequence see, which are those that it can read together with others.
    visible = np.zeros(context_lens.shape[0], np.int64)
    most, parts_max = 0, 0
    for s in range(context_lens.shape[0]):
        tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        most += cuts[s, 0] if cuts[s, 0] > 0 else (tokens + per_tile - 1) // per_tile
        parts_max = max(parts_max, context_lens[s] // split + 1)
        if window <= 0:
            visible[s] = (context_lens[s] - tokens + 1) // block_size
    items = np.empty((most, ITEM_FIELDS), np.int64)
    members = np.empty((most, MEMBER_FIELDS), np.int64)
    num_items = add_long_chunks(cu_seqlens_q, context_lens, group, window, per_tile, items, members)
    num_members = num_items
    for few in (True, False):
        short = short_sequences(cu_seqlens_q, cuts, group, few)
        order, leading = in_order(block_tables, visible, short)
        rows_max = min(tile_tokens(group) * group if few else CHUNK_ROWS, all_rows // items_min)
        for part in range(parts_max):
            alike, rows = 0, 0
            for i in range(order.shape[0]):
                s = order[i]
                tokens = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
                context = context_lens[s]
                alike = min(alike, leading[i])
                first = first_key(context, tokens, window)
                begin, end = max(first, part * split), min(context, (part + 1) * split)
                if begin >= end:
                    continue
                shared = min(alike * block_size, end) - begin
                together = begin + max(0, shared) // key_tile * key_tile
                if together == begin or rows + tokens * group > rows_max:
                    set_item(items, num_items, num_members, num_members, begin, few)
                    num_items += 1
                    together = begin
                    rows = 0
                items[num_items - 1, END] += 1
                keys = (context - tokens, end, together)
                set_member(members, num_members, (s, cu_seqlens_q[s], tokens, rows), keys)
                if cuts[s, 0] > 1:
                    members[num_members, PART] = cuts[s, 1] + (part - first // split) * tokens * group
                num_members += 1
                rows += tokens * group if few else whole_lanes(tokens * group)
                alike = visible[s]
    return items[:num_items], members[:num_members], cuts, part_rows
