"""Made-up verdicts: chains of which some nodes were run and some accepted."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from vllm_specblock.triton_kernels.feedback.write_survival import SeenNodes

from vllm_specblock.feedback.verified_trees import VerifiedTrees

NODES, DEPTH, SPARE_SLOTS = 8, 5, 3


def some_requests(count: int, draw: random.Random) -> list[SimpleNamespace]:
    """Some drafted by one head, some by both, some by none; greedy, cold and hot."""
    requests = []
    for _ in range(count):
        size = draw.randint(0, DEPTH)
        run = draw.randint(0, size)
        requests.append(
            SimpleNamespace(
                origin=[draw.randint(1, 3) for _ in range(size)],
                chance=sorted((draw.uniform(0.01, 1) for _ in range(size)), reverse=True),
                run=run,
                accepted=draw.randint(0, run),
                temperatures=draw.choice([0.0, 0.3, 0.7, 1.0, 1.7]),
            )
        )
    return requests


def verified_of(
    requests: list[SimpleNamespace], device: str | torch.device = "cpu"
) -> VerifiedTrees:
    """What an engine would know of requests; values that must not be read are noise."""
    count = len(requests)
    slots = count + SPARE_SLOTS
    req_idx = torch.randperm(slots, dtype=torch.int32)[:count]
    score, temperatures = torch.full((slots, NODES), torch.nan), torch.full((slots,), torch.nan)
    origin = torch.zeros(slots, NODES, dtype=torch.uint8)
    path = torch.zeros(count, DEPTH + 1, dtype=torch.int64)
    for index, (at, request) in enumerate(zip(req_idx.tolist(), requests)):
        size = len(request.origin)
        origin[at, :size] = torch.tensor(request.origin, dtype=torch.uint8)
        score[at, :size] = torch.tensor(request.chance).log()
        temperatures[at] = request.temperatures
        path[index, : request.accepted + 1] = torch.arange(request.accepted + 1)
    counts = torch.tensor([[each.run, each.accepted] for each in requests]).view(-1, 2)
    run, accepted = counts.unbind(1)
    tensors = (req_idx, run, accepted.int(), path, score, origin, temperatures)
    return VerifiedTrees(*(each.to(device) for each in tensors))


def to_be_counted(
    origin: torch.Tensor, req_idx: torch.Tensor, num_run: torch.Tensor, path: torch.Tensor
) -> VerifiedTrees:
    """What counters look at, with nothing in the place of all else."""
    return VerifiedTrees(req_idx, num_run, num_run, path, None, origin, None)


def falling_rates(seen: SeenNodes, kind: int) -> list[float]:
    """How often nodes of each bin are reached: pool adjacent violators, from left to right."""
    pools: list[list[float]] = []
    counts = seen.judged[kind].double() + seen.prior
    sums = seen.reached[kind].double() + seen.prior * seen.believed.double()
    for n, s in zip(counts.tolist(), sums.tolist()):
        pools.append([n, s, 1])
        while len(pools) > 1 and pools[-2][1] / pools[-2][0] < pools[-1][1] / pools[-1][0]:
            more = pools.pop()
            pools[-1] = [x + y for x, y in zip(pools[-1], more)]
    return [s / n for n, s, width in pools for _ in range(int(width))]
