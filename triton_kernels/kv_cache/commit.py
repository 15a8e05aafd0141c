"""Commit of an accepted path in the paged KV caches: move entries from slot to slot.

The reference is `commit.move_path`. A source may be another row's target, so all rows of
a request are read before any is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, strides_of, tl

if TYPE_CHECKING:  # it needs numba
    from ..attention.cpu_packing import Packing


class CacheStrides(NamedTuple):
    """Strides of a cache [num_blocks, num_kv_heads, block_size, C]."""

    block: int
    head: int
    entry: int
    dim: int


class KVCacheSet:
    """Caches of layers with one geometry, prepared so that one launch serves all.

    caches: per layer [num_blocks, num_kv_heads, block_size, C], all of one shape, stride, dtype
    and device. Raises ValueError if they differ or there is none.
    packing: how they are packed, on a CPU; None: not packed.
    """

    def __init__(self, caches: Sequence[torch.Tensor], packing: Packing | None = None) -> None:
        if not caches:
            raise ValueError("a KVCacheSet needs the cache of at least one layer")
        first = caches[0]
        forms = {(tuple(x.shape), x.stride(), x.dtype, x.device) for x in caches}
        if len(forms) > 1:
            raise ValueError(
                "the caches of a KVCacheSet must agree in shape, strides, dtype and device: "
                f"{sorted(map(str, forms))}"
            )
        # Entries are only moved: integers serve every cache dtype.
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.element_size()]
        self.caches = [cache.view(integer) for cache in caches]
        self.packing = packing
        addresses = [cache.data_ptr() for cache in caches]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)


def move_kv(
    kv_caches: KVCacheSet,
    source_slot: torch.Tensor,
    target_slot: torch.Tensor,
    moves: torch.Tensor,
) -> None:
    """Copy entries from source to target slots in every layer, in place, with torch.

    source_slot, target_slot [R, D] int64 (slot = block · block_size + offset; negative: padding);
    moves [R, D] bool. Rows that do not move, or that name a padding slot, change nothing.
    Two moving rows may not share a target, nor may one's target be another request's source.

    Shapes do not depend on how many rows move: an idle row repeats the first moving one, or if none
    moves rewrites that row's source. Rewriting its own slot could undo a move.
    """
    if kv_caches.packing is not None:
        from ..attention.cpu_packing import move_packed

        stride, source = kv_caches.caches[0].stride(0), torch.where(moves, source_slot, -1)
        return move_packed(kv_caches.pointers, stride, kv_caches.packing, source, target_slot)
    source, target = source_slot.flatten(), target_slot.flatten()
    if source.numel() == 0:
        return
    live = moves.flatten() & (source >= 0) & (target >= 0)
    first = live.to(torch.uint8).argmax(0, keepdim=True)
    first_source = source.index_select(0, first).clamp(min=0)
    first_target = torch.where(live.any(), target.index_select(0, first), first_source)
    source = torch.where(live, source, first_source)
    target = torch.where(live, target, first_target)

    size = kv_caches.caches[0].shape[2]
    for cache in kv_caches.caches:
        entries = cache[source // size, :, source % size]
        cache[target // size, :, target % size] = entries


class AcceptedRows(NamedTuple):
    """Accepted paths of R requests, and the batch rows of the requests.

    A request's rows are its `base` rows up to and including the root, then its nodes in tree
    order.
    """

    query_start: torch.Tensor  # [R] int32, first batch row of each request
    base: torch.Tensor  # [R] int64
    path: torch.Tensor  # [R, D+1] int64, node at each position; column 0 is the root
    accepted: torch.Tensor  # [R] int32, draft nodes on the path


def move_path_triton(
    kv_caches: KVCacheSet, slot_mapping: torch.Tensor, rows: AcceptedRows, num_rows: int
) -> None:
    """Launch the kernel, one program per request, kv head and layer; see `commit.move_path`.

    `rows` may hold columns of a table.
    """
    num_requests, depth = len(rows.path), rows.path.shape[1] - 1
    if num_requests * depth * num_rows == 0:
        return
    cache = kv_caches.caches[0]
    _, num_kv_heads, block_size, width = cache.shape
    integer = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32}[cache.dtype]
    # All rows are in registers at once: more rows leave room for fewer columns.
    block_rows = next_power_of_2(depth)
    block_c = min(next_power_of_2(width), 128, max(4096 // block_rows, 16))
    _move_path_kernel[(num_requests, num_kv_heads, len(kv_caches.caches))](
        kv_caches.pointers,
        slot_mapping,
        rows,
        strides_of(rows),
        CacheStrides(*cache.stride()),
        num_rows - 1,
        depth,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        INTEGER=integer,
        BLOCK_ROWS=block_rows,
        BLOCK_C=block_c,
        num_warps=4,
    )


@jit(do_not_specialize=["slot_mapping_ptr", "last_row"])
def _move_path_kernel(
    caches_ptr,  # [layers] int64: address of each layer's cache
    slot_mapping_ptr,  # [batch rows] int64
    rows,  # AcceptedRows
    strides,  # AcceptedRows, their strides
    cache_strides,  # CacheStrides
    last_row,  # of the batch
    depth,  # D
    WIDTH: tl.constexpr,  # C, elements per entry
    BLOCK_SIZE: tl.constexpr,
    INTEGER: tl.constexpr,  # the element's size as an integer type
    BLOCK_ROWS: tl.constexpr,  # >= D
    BLOCK_C: tl.constexpr,
):
    """Move all D rows of one request in one layer and kv head, BLOCK_C columns at a time."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    cache = tl.load(caches_ptr + tl.program_id(2)).to(tl.pointer_type(INTEGER))
    cache += head * cache_strides.head
    place = tl.arange(0, BLOCK_ROWS) + 1
    on_path = (place <= tl.load(rows.accepted + request * strides.accepted)) & (place <= depth)
    node = tl.load(rows.path + request * strides.path + place, mask=on_path, other=0)
    live = on_path & (node != place)
    root = tl.load(rows.query_start + request * strides.query_start)
    root += tl.load(rows.base + request * strides.base) - 1
    # A padding request has a stale verdict and no rows.
    row = tl.minimum(root + node, last_row)
    source = tl.load(slot_mapping_ptr + row, mask=live, other=-1)
    row = tl.minimum(root + place, last_row)
    target = tl.load(slot_mapping_ptr + row, mask=live, other=-1)
    live = live & (source >= 0) & (target >= 0)
    read = cache + source // BLOCK_SIZE * cache_strides.block
    read += source % BLOCK_SIZE * cache_strides.entry
    write = cache + target // BLOCK_SIZE * cache_strides.block
    write += target % BLOCK_SIZE * cache_strides.entry
    for start in range(0, WIDTH, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (column < WIDTH)[None, :]
        entries = tl.load(read[:, None] + column[None, :] * cache_strides.dim, mask=mask)
        # Threads hold different rows: every thread must have read before one writes.
        tl.debug_barrier()
        tl.store(write[:, None] + column[None, :] * cache_strides.dim, entries, mask=mask)
