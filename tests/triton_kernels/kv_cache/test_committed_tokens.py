"""One launch says of a step's rows what the torch description of it says."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on, wide
from vllm_specblock.triton_kernels.kv_cache.committed_tokens import StepRows

from vllm_specblock.commit import committed_tokens

HUGE = 2**40


def ragged(count: int, seed: int, depth: int = 5, nodes: int = 11) -> tuple[StepRows, int]:
    """Arguments of `committed_tokens`: decodes, prompt chunks and requests without a verdict.

    The batch has a row of no request, and one request at the end without rows. Values that may not
    be read are far outside of every tensor.
    """
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    drafted = among(0, 3, count) > 0
    base = torch.where(among(0, 2, count) > 0, torch.ones(count).long(), among(1, 60, count))
    scheduled = base + torch.where(drafted, among(0, nodes, count), 0)
    path = torch.cat([torch.zeros(count, 1).long(), among(1, nodes, count, depth)], 1)
    path = path.sort(1).values
    accepted = torch.where(drafted, among(0, depth, count), 0).int()
    accepted = accepted.minimum((scheduled - base).int())
    unused = torch.arange(depth + 1) > accepted[:, None]
    path[unused & (among(0, 1, *path.shape) > 0)] = HUGE
    # A padding request: a layout like the others', no rows, and an old verdict.
    base[-1], scheduled[-1], accepted[-1], drafted[-1] = 1, 0, 3, True

    start = scheduled.cumsum(0) - scheduled
    num_rows = int(scheduled.sum()) + 1
    slots, longest = count + 3, 80
    known = torch.full((count, 3), HUGE)
    known[:, 0] = torch.randperm(slots, generator=draw)[:count]
    text, temperature = among(0, 30_000, slots, longest).int(), torch.rand(slots, generator=draw)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[known[:, 0]] = False
    text[unused], temperature[unused] = -1, float("nan")
    positions = among(0, longest - 1, num_rows)  # up to the last token that there is place for
    rows = base + torch.where(drafted, depth, 0)
    row_start = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    request = torch.arange(count).repeat_interleave(rows)
    local = torch.arange(len(request)) - row_start[request]
    slot_mapping = torch.cat([among(0, 999, num_rows), torch.full((9,), HUGE)])
    of_paths, layout = (start, base, path, accepted), (request, local, row_start.int())
    of_batch, of_slots = (positions, slot_mapping), (known[:, 0], text, temperature)
    hidden, first = 16 * among(0, 2, 2, count)
    return StepRows(*of_paths, *layout, *of_batch, *of_slots, hidden, first), num_rows


def spread(step: StepRows) -> StepRows:
    """The same rows, no tensor of the requests contiguous."""
    columns = {name: column(getattr(step, name)) for name in ("query_start", "base", "accepted")}
    return step._replace(**columns, path=wide(step.path), text=wide(step.text))


# Rows of one program, of several; 300 requests are more than a program's, too. Depth 0: no drafts.
@pytest.mark.parametrize(("count", "depth"), [(1, 5), (3, 5), (17, 5), (300, 5), (130, 0)])
@pytest.mark.parametrize("form", [StepRows._make, spread], ids=["plain", "strided"])
def test_as_torch_does(kernels, count, depth, form):
    launch = kernels.load("committed_tokens").committed_tokens_triton
    step, num_rows = ragged(count, seed=count, depth=depth)
    found = launch(on(kernels.device, form(step)), num_rows)
    assert_equal(tuple(found), tuple(committed_tokens(step, num_rows)))


def test_no_requests(kernels):
    step, num_rows = ragged(2, 0)
    of_batch = {"positions", "slot_mapping", "text", "temperature"}
    none = {x: getattr(step, x)[: x == "row_start"] for x in set(step._fields) - of_batch}
    launch = kernels.load("committed_tokens").committed_tokens_triton
    found = launch(on(kernels.device, step._replace(**none)), num_rows)
    assert [tuple(x.shape) for x in found] == [(0,)] * 7
