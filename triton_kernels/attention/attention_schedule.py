"""Launch schedule of tree attention: tiles and splits from host numbers alone.

A request's rows (query tokens × query heads of a kv head) go to tiles of the smallest class that
holds them; its entries are read in splits, by its length and rows. Neither depends on the rest of
the batch, so a request's result has the same bits in every batch and captured graph.

With few programs each split has its own, and a second kernel merges the partial results in order;
with many, one program reads all splits and merges them in that order. If the device allocates the
rows, a graph launches both forms, and the device skips one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..optional_triton import cdiv, next_power_of_2

PROGRAMS = 128
"""Programs that fill the GPU (an H200 has 132 multiprocessors). One request is split into about as
many; larger batches need no splits."""
SPLIT_ENTRIES = 512
"""Minimum cache entries of a split."""
MAX_SPLITS = 16
"""Maximum splits of a request. Limits the workspace to PROGRAMS · MAX_SPLITS tiles."""
CLASSES = (16, 64, 128)
"""Rows of a tile. Tensor cores need 16, Hopper's 64; a tree of 61 tokens and 4 query heads per kv
head has 244 rows, or two tiles of 128."""
_DEEP = 4
"""Buffers of keys, and of values: two blocks are loaded while one is multiplied."""
_SPARE = 1024  # bytes of shared memory that barriers and reductions take
_WIDE_SHARED = 160 * 1024  # of sm_80; sm_86 and sm_89 have 99 KB
HOPPER_SHARED = 227 * 1024
"""Maximum bytes of shared memory of a program on sm_90."""
HOPPER = 9
"""Major compute capability of sm_90."""


@dataclass(frozen=True)
class Tile:
    """One class of tiles: compile-time constants of a kernel."""

    rows: int
    entries: int  # read at a time
    masked_entries: int  # the same where a mask is needed
    num_warps: int
    num_stages: int  # of the loop without a mask


@cache
def tile_classes(
    head_size: int, dtype: torch.dtype, shared: int, generation: int = HOPPER
) -> tuple[Tile, ...]:
    """Tiles for a layer, the smallest first.

    head_size: of the values. dtype: the queries'. shared: bytes of shared memory of a program.
    generation: major compute capability of the GPU.
    """
    # Float32 products are three products of parts, which also need shared memory.
    width = max(next_power_of_2(head_size), 16) * (8 if dtype == torch.float32 else 2)
    most = max(_floor_power_of_2(shared // 3 // width), 16)
    # On other GPUs a tile of 128 rows spills, as does one of 64 with four warps.
    wide = generation == HOPPER or (generation < HOPPER and shared >= _WIDE_SHARED)
    rows = sorted({min(size, most) for size in (CLASSES if wide else CLASSES[:-1])})
    eight_warps = 128 if generation == HOPPER else 64
    entries, num_stages = _pipeline(shared - rows[-1] * width, width)
    if head_size > 256:  # latent attention: the sums of 32 rows take nearly all registers
        rows, entries, eight_warps = ([16, 32], 16, 16) if wide else ([16], 32, 16)
    # Masks of 64 or more entries do not fit in the registers of a tile of 128 rows.
    return tuple(
        Tile(
            size,
            entries,
            min(entries, 32 if size > 16 else 128),
            8 if size >= eight_warps else 4,
            num_stages,
        )
        for size in rows
    )


def _pipeline(free: int, width: int) -> tuple[int, int]:
    """(entries of a block, stages of the loop over blocks) for the shared memory beside queries.

    A block loads its index first, then keys and values: two stages per block, and one more. Below
    seven stages, no loads overlap with the products.

    free: bytes. width: bytes of one key.
    """
    for entries in (64, 32):
        if free >= _DEEP * 2 * entries * width + _SPARE:
            return entries, 2 * _DEEP - 1
    entries = _floor_power_of_2(free // (2 * 2 * width))
    return min(max(entries, 16), 128), 3


@cache
def shared_memory(device: torch.device) -> int:
    """Return the maximum shared memory of a program in bytes; interpreter: sm_90's."""
    if device.type != "cuda":
        return HOPPER_SHARED
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack it
    return int(properties.shared_memory_per_block_optin)


@cache
def generation(device: torch.device) -> int:
    """Return the major compute capability; interpreter: sm_90's."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER


@dataclass(frozen=True)
class Launch:
    """One launch, for requests with more than `above` and at most `up_to` rows."""

    tile: Tile
    above: int
    up_to: int
    tiles: int  # of the largest request
    slots: int  # tiles × splits of any request, at most
    whole: bool  # one program reads all splits of its tile
    single: bool  # no request has more than one split
    requests: int  # R, or fewer where a batch of more is another launch's
    whole_from: int  # a batch of so many requests is for the launch that is `whole`; 0: any batch


def plan_launches(
    classes: tuple[Tile, ...],
    query_lens: Iterable[int],
    group: int,
    num_requests: int,
    num_kv_heads: int,
    max_seq_len: int,
    unknown_up_to: int = 0,
) -> list[Launch]:
    """Return a launch for each class of tiles that a batch may need.

    Args:
        query_lens: the lengths of requests, in query tokens; the largest is a bound.
        group: query heads per kv head.
        num_requests: an upper bound with `unknown_up_to`: missing requests come last.
        max_seq_len: bound of the requests' entries.
        unknown_up_to: the host does not know the lengths of requests of up to this many tokens; one
            class serves them all.

    Together the launches cover requests of any length.
    """
    rows = [n * group for n in query_lens if n > 0] or [1]
    # Classes, and the rows of the largest request of each.
    serves = [(tile, tile.rows) for tile in classes]
    if unknown_up_to:
        # Padding rows are multiplied too, but the hardware needs 64.
        shared = next((tile for tile in classes if tile.rows >= 64), classes[-1])
        rows.append(unknown_up_to * group)
        serves = [(shared, unknown_up_to * group), serves[-1]]
    wanted = sorted({_class_of(serves, n) for n in rows})
    launches, above = [], 0
    for place, index in enumerate(wanted):
        (tile, most), last = serves[index], place == len(wanted) - 1
        # The last launch has no upper limit.
        up_to = 1 << 30 if last else most
        tiles = cdiv(max(rows) if last else most, tile.rows)
        splits = min(MAX_SPLITS, cdiv(max_seq_len, SPLIT_ENTRIES), PROGRAMS // num_kv_heads)
        splits = max(splits, 1)
        slots = max(tiles, min(PROGRAMS // num_kv_heads, tiles * splits))
        # Requests that fill the GPU without splits.
        whole_from = cdiv(PROGRAMS, num_kv_heads * tiles)
        if splits == 1 or num_requests < whole_from:
            forms = [(splits == 1, num_requests, 0)]
        elif unknown_up_to and whole_from > 1:
            # Only the device knows the number of requests; the last launch covers all.
            forms = [(False, whole_from - 1, whole_from), (True, num_requests, whole_from)]
        else:
            forms = [(True, num_requests, 0)]
        for whole, requests, decides in forms:
            launches.append(
                Launch(tile, above, up_to, tiles, slots, whole, splits == 1, requests, decides)
            )
        above = up_to
    return launches


def _class_of(serves: list[tuple[Tile, int]], rows: int) -> int:
    return next((i for i, (_, most) in enumerate(serves) if rows <= most), len(serves) - 1)


def _floor_power_of_2(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1
