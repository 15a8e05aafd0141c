"""One launch stores keys and values where torch stores them, and padding nowhere."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.commit.store import store_kv

FP8 = torch.float8_e4m3fn
BLOCKS, BLOCK_SIZE = 7, 12


def empty_cache(heads, size, dtype, device):
    """Entries consecutive in memory, as vLLM lays them; full of what was there before."""
    cache = torch.full((BLOCKS, BLOCK_SIZE, heads, 2 * size), 3.5, device=device).to(dtype)
    return cache.transpose(1, 2)


def entries_of(count, device):
    """Every third one padding; a column of a table whose others name an entry that must stay."""
    torch.manual_seed(count)
    table = torch.zeros(count, 3, dtype=torch.int64)
    table[:, 0] = 1 + torch.randperm(BLOCKS * BLOCK_SIZE - 1)[:count]
    table[::3, 0] = -5
    return table.to(device)[:, 0]


def stored_by_torch(cache, kv_index, *given):
    """The cache that the reference leaves, but for entry 0, where it puts padding."""
    cache = (cache.view(torch.uint8) if cache.dtype == FP8 else cache).cpu().clone()
    first = cache[0, :, 0].clone()
    view = cache.view(FP8) if cache.dtype == torch.uint8 else cache
    store_kv(view, kv_index.cpu(), *(x.cpu() for x in given))
    cache[0, :, 0] = first
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("count", "heads", "size"), [(1, 1, 2), (2, 1, 16), (17, 3, 40), (40, 8, 128), (5, 2, 256)]
)
def test_as_torch_stores(kernels, count, heads, size, dtype):
    cache = empty_cache(heads, size, dtype, kernels.device)
    kv_index = entries_of(count, kernels.device)
    # Two of three that one projection made, and padding that is not a number.
    rows = torch.randn(count, 3, heads, size, device=kernels.device).to(dtype)
    rows[::3] = torch.nan
    key, value = rows[:, 1], rows[:, 2]
    wanted = stored_by_torch(cache, kv_index, key, value)
    kernels.load("store_kv").store_kv_triton(cache, kv_index, key, value)
    assert torch.equal(cache.cpu(), wanted)
    assert count < 3 or (cache != 3.5).any()


def test_float8(kernels):
    """Each number that float8 has, by a scale; beyond them the largest; keys unlike values."""
    bits = torch.arange(256, dtype=torch.uint8)
    every = bits[(bits & 127) != 127].view(FP8).float()  # NaN has no place
    far = torch.tensor([448.1, 1e9, torch.inf, -500, -torch.inf, -1e30])
    numbers = torch.cat([every, far, every[:60]]).view(5, 2, 32)
    scales = [torch.tensor(x, device=kernels.device) for x in (0.25, 4.0)]
    key, value = (x.to(kernels.device) for x in (numbers * 0.25, numbers.flip(0) * 4))
    cache = empty_cache(2, 32, FP8, kernels.device)
    kv_index = torch.tensor([80, 1, 12, -1, 11], device=kernels.device)
    wanted = stored_by_torch(cache, kv_index, key, value, *scales)
    kernels.load("store_kv").store_kv_triton(cache, kv_index, key, value, *scales)
    assert torch.equal(cache.view(torch.uint8).cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_rounds_as_torch(kernels, dtype):
    if kernels.interpreted:
        pytest.skip("Triton's interpreter neither carries nor knows float8's NaN")
    torch.manual_seed(0)
    key, value = torch.randn(2, 40, 8, 128, device=kernels.device).to(dtype)
    key[1, 0, 0], value[2, 1, 1] = torch.nan, -torch.nan
    scales = [torch.tensor(x, device=kernels.device) for x in (0.037, 0.0051)]
    cache = empty_cache(8, 128, FP8, kernels.device)
    kv_index = entries_of(40, kernels.device)
    wanted = stored_by_torch(cache, kv_index, key, value, *scales).view(FP8).float()
    kernels.load("store_kv").store_kv_triton(cache, kv_index, key, value, *scales)
    torch.testing.assert_close(cache.float().cpu(), wanted, atol=0, rtol=0, equal_nan=True)


def test_any_layout_and_no_rows(kernels):
    launch = kernels.load("store_kv").store_kv_triton
    key, value = torch.randn(2, 20, 2, 8, device=kernels.device)
    kv_index = entries_of(20, kernels.device)
    consecutive = empty_cache(2, 8, torch.float32, kernels.device)
    heads_outermost = consecutive.contiguous()
    launch(heads_outermost, kv_index, key, value)
    launch(consecutive, kv_index, key, value)
    assert torch.equal(heads_outermost, consecutive)
    launch(consecutive, kv_index[:0], key[:0], value[:0])
    assert torch.equal(heads_outermost, consecutive)
