"""Keys and values go to their entries, padding to none that is read."""

from __future__ import annotations

import pytest
import torch
from support.tensors import column

from vllm_specblock.commit import store_kv

FP8 = torch.float8_e4m3fn
HEADS, SIZE, BLOCK_SIZE = 3, 40, 12


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def device(request) -> str:
    if request.param == "cuda":
        pytest.importorskip("vllm._custom_ops")  # loads the kernel
    return request.param


def empty_cache(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Entries consecutive in memory, as vLLM lays them; full of what was there before."""
    cache = torch.full((7, BLOCK_SIZE, HEADS, 2 * SIZE), 3.5, device=device).to(dtype)
    return cache.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_entry_is_where_it_belongs(device, dtype):
    cache, slots = empty_cache(dtype, device), torch.tensor([80, 1, -5, 12, 11], device=device)
    # Two of three that one projection made, and padding that is not a number.
    rows = torch.randn(5, 3, HEADS, SIZE, device=device).to(dtype)
    rows[2] = torch.nan
    store_kv(cache, column(slots), rows[:, 1], rows[:, 2])
    entries = cache.transpose(1, 2).reshape(-1, HEADS, 2 * SIZE)
    live = slots[slots >= 0]
    assert torch.equal(entries[live], torch.cat([rows[:, 1], rows[:, 2]], -1)[slots >= 0])
    entries[live] = 3.5
    assert (entries[1:] == 3.5).all()  # entry 0 is in the null block, which is not read
    store_kv(cache, slots[:0], rows[:0, 1], rows[:0, 2])


def test_float8_keeps_its_range(device):
    """Each number that float8 has, by a scale; beyond them the largest; keys unlike values."""
    bits = torch.arange(256, dtype=torch.uint8)
    every = bits[(bits & 127) != 127].view(FP8).float()  # without NaN
    far = torch.tensor([448.1, 1e9, torch.inf, -500, -torch.inf, -1e30])
    numbers = torch.cat([every, far, every[:100]]).view(3, HEADS, SIZE)
    scales = [torch.tensor(x, device=device) for x in (0.25, 4.0)]
    cache = empty_cache(FP8, device)
    given = (numbers * 0.25, numbers.flip(0) * 4)
    store_kv(
        cache, torch.tensor([80, 1, 12], device=device), *(x.to(device) for x in given), *scales
    )
    found = cache.float().cpu().transpose(1, 2).reshape(-1, HEADS, 2 * SIZE)[[80, 1, 12]]
    wanted = torch.cat([numbers, numbers.flip(0)], -1).clamp(-448, 448)
    assert torch.equal(found, wanted)


def test_a_cache_that_torch_would_copy_is_refused():
    scattered = torch.zeros(3, 2, 4, 6)  # heads outermost within a block
    with pytest.raises(RuntimeError, match="view"):
        store_kv(scattered, torch.tensor([1]), torch.ones(1, 2, 3), torch.ones(1, 2, 3))
