"""Made-up steps to record; values that must not be read are far out of range."""

from __future__ import annotations

import torch
from support.tensors import column
from vllm_specblock.triton_kernels.feedback.record_step import SlabTensors, StepToRecord

from vllm_specblock.feedback.verified_trees import VerifiedTrees

FAR = 2**40
DEPTH = 5


def some_slabs(
    seed: int, slabs: int, rows: int, hidden: int, slots: int, dtype: torch.dtype
) -> SlabTensors:
    """Slabs full of noise; most of them and most slots are in use."""
    draw = torch.Generator().manual_seed(seed)
    made = SlabTensors.empty(slabs, rows, hidden, slots, dtype)
    for each in (made.states, made.last):
        each.copy_(torch.randn(each.shape, generator=draw))
    made.token.random_(0, 1000, generator=draw)
    made.begin.random_(0, 40, generator=draw)
    made.end.copy_(made.begin + torch.randint(0, rows + 1, (slabs,), generator=draw))
    owners = torch.randperm(slots - 1, generator=draw)[: max(0, slabs - 1)]
    made.of_slot[owners] = torch.randperm(slabs, generator=draw)[: len(owners)].int()
    made.missed.random_(0, 9, generator=draw)
    made.steps.random_(0, 9, generator=draw)
    return made


def some_step(
    seed: int, slabs: SlabTensors, requests: int, nodes: int, fillers: int, spread: bool
) -> StepToRecord:
    """A step of `requests` of the slots and `fillers` rows of the last one, which is unused.

    Positions are near those of the slabs; padding is in every request's rows.
    """
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    slots, (_, _, hidden) = len(slabs.of_slot), slabs.last.shape
    slot = torch.cat(
        [torch.randperm(slots - 1, generator=draw)[:requests], torch.full((fillers,), slots - 1)]
    )
    count = len(slot)
    real = among(1, DEPTH + 1, count)
    padded = real + among(0, 2, count)
    start = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    request = torch.arange(count).repeat_interleave(padded)
    local = torch.arange(len(request)) - start[request]
    slab = slabs.of_slot[slot].long()
    first = torch.where(slab >= 0, slabs.begin[slab] + among(-6, slabs.token.shape[1], count), 7)
    position = first.clamp(min=0)[request] + local
    batch = len(request) + 5
    kept = local < real[request]
    source = torch.randperm(batch, generator=draw)[: len(request)]
    parent = among(-1, nodes, slots, nodes).int()
    path = among(0, nodes, count, DEPTH + 1)
    path[:, 0] = 0
    accepted = among(0, DEPTH, count).int()
    path[torch.arange(DEPTH + 1) > accepted[:, None]] = FAR
    run = among(0, nodes, count) * (among(0, 3, count) > 0)
    origin = (among(0, 3, slots, nodes) > 0).to(torch.uint8)
    *states, last = (
        torch.randn(batch, hidden + 3, generator=draw).to(slabs.last.dtype)[:, :hidden]
        for _ in range(4)
    )
    ours = (slot, run, accepted)
    if spread:
        ours, path = tuple(map(column, ours)), torch.nn.functional.pad(path, (0, 2), value=FAR)
        path = path[:, : DEPTH + 1]
    result = VerifiedTrees(*ours, path, None, origin, None)
    return StepToRecord(
        request,
        source,
        torch.where(kept, among(0, 30_000, len(request)), 0),
        position,
        torch.where(kept, among(0, 999, len(request)), -1),
        start[:-1] + real - 1,
        tuple(states),
        last,
        result,
        parent,
    )
