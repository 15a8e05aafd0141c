"""vLLM's kernels of Model Runner V2 as a CPU runs them, against the kernels in the interpreter."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from support.engines import MARKERS, shared_engine
from support.matrix import PROMPTS
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.triton_utils.dispatcher import KernelOverride, _registry
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.utils import KVBlockZeroer

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="what runs on a CPU only")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e5])
def test_sampled_tokens_are_the_kernels(monkeypatch, dtype, scale):
    """Over a vocabulary of several blocks, flat and steep, nearly all of it masked or none; greedy
    rows take the first of equals; with negative, large and repeated seeds."""
    torch.manual_seed(int(scale))
    scores = scale * torch.randn(9, 5003)
    scores[3].masked_fill_(torch.rand(5003) < 0.99, float("-inf"))
    scores[4].fill_(float("-inf"))
    scores[8, 40:44] = 1e6
    scores, req_idx = scores.to(dtype), torch.tensor([0, 1, 2, 1, 1, 2, 2, 1, 0])
    heat, seeds = torch.tensor([0.0, 0.6, 1.0]), torch.tensor([1, -(1 << 61), (1 << 40) + 3])
    known = scores[:, :5001], req_idx, heat, seeds

    def call():
        tokens = [
            gumbel.gumbel_sample(*known, position, apply, is_drafting=False, use_fp64=False)
            for position in (torch.arange(9) * 1001, torch.arange(1 << 20, (1 << 20) + 9))
            for apply in (False, True)
        ]
        return torch.stack(tokens)

    ours, name = call(), "_gumbel_sample_kernel"
    monkeypatch.setattr(gumbel, name, _registry[f"{gumbel.__name__}.{name}"][0])
    assert torch.equal(ours, call()) and (ours[:, 8] == 40).all() and len(ours.unique()) > 5


@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_top_k_and_top_p_keep_what_a_sort_keeps(scale):
    """With ties at the k-th, rows that are masked already, and rows that want neither."""
    draw = torch.Generator().manual_seed(4)
    scores = scale * torch.randn(6, 3001, generator=draw)
    scores[1] = scores[1].round()
    scores[2, 5:] = float("-inf")
    k = torch.tensor([3001, 700, 9, 1, 40, 3001], dtype=torch.int32)
    p = torch.tensor([0.9, 0.97, 0.7, 0.4, 1.0, 1.0])
    for top_k, top_p in ((k, None), (None, p), (k, p)):
        order = scores.sort(dim=1, stable=True)
        kept = order.values.double()
        if top_k is not None:
            kept[kept < kept.gather(1, 3001 - top_k.long()[:, None])] = float("-inf")
        if top_p is not None:
            out = kept.softmax(1).cumsum(1) <= 1 - top_p.double()[:, None]
            out[:, -1] = False
            kept[out] = float("-inf")
        wanted = torch.empty_like(scores).scatter_(1, order.indices, kept.float())
        ours = topk_topp_sampler.apply_top_k_top_p(scores.clone(), top_k, top_p)
        assert torch.equal(ours, wanted)


def test_new_blocks_are_zeroed_as_by_the_kernel(monkeypatch):
    """In layers with strides of their own; what lies between two blocks stays."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=0, kernel_block_stride=0)
    group.layer_names, name, found = ["whole", "part"], "_zero_kv_blocks_kernel", []
    for kernel in (getattr(worker_utils, name), _registry[f"{worker_utils.__name__}.{name}"][0]):
        monkeypatch.setattr(worker_utils, name, kernel)
        torch.manual_seed(0)
        whole, memory = torch.randn(5, 2, 16, 16), torch.randn(5, 2, 16, 48)
        caches = whole, memory.transpose(1, 2)[:, :15, :, 16:40]
        layers = {x: SimpleNamespace(kv_cache=y) for x, y in zip(group.layer_names, caches)}
        KVBlockZeroer(torch.device("cpu"), [group], [16], layers, 5).zero_block_ids([3, 1])
        found.append(torch.cat([whole, memory], 3))
    assert torch.equal(*found)
    assert not whole[[1, 3]].any() and memory[[1, 3]].any() and whole[[0, 2, 4]].all()


OF_LOGITS = "temperature min_p penalties bad_words bias thinking_budget topk_log_softmax ranks"
OF_BATCHES = (
    "prepare_pos_seq_lens prepare_prefill_inputs combine_sampled_and_draft_tokens "
    "get_num_sampled_and_rejected post_update expand_idx_mapping"
)
KERNELS = {f"_{name}_kernel" for name in f"{OF_LOGITS} {OF_BATCHES}".split()}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
REQUESTS = (
    {"temperature": 0.7, "min_p": 0.05},
    PENALTIES,
    {"presence_penalty": 0.7, "temperature": 1.7, "min_p": 0.4, "logprobs": 2},
    {"logit_bias": {20: 4.0, 33: -5.0}, "stop_token_ids": [20], "min_tokens": 9},
    {"allowed_token_ids": list(range(3, 2048, 3)), "temperature": 1.0, "logprobs": 4},
    {"thinking_token_budget": 3},
    # Where the grammar allows nothing but the end, the end is allowed before `min_tokens`.
    {
        "structured_outputs": StructuredOutputsParams(regex="[ab]"),
        "min_tokens": 5,
        "ignore_eos": False,
    },
    {"bad_words": ["a", "return self"]},  # a token, and the end of several
)


def hold_launches(patch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on, compare what each launch of a replacement writes with what the kernel writes.

    Returns the launches that wrote, by kernel.
    """
    kernels = {ours: (path.split(".")[-1], theirs) for path, (theirs, ours) in _registry.items()}
    wrote, launcher = Counter(), KernelOverride.__getitem__

    def launch(override, grid):
        ours, (name, kernel) = launcher(override, grid), kernels[override.func]
        if name not in KERNELS:
            return ours

        def both(*args, **kwargs):
            memo = {}  # tensors that share memory still do in the copies
            copies = tree_map_only(torch.Tensor, lambda x: deepcopy(x, memo), (args, kwargs))
            leaves = zip(tree_leaves((args, kwargs)), tree_leaves(copies), strict=True)
            pairs = [pair for pair in leaves if torch.is_tensor(pair[0])]
            ours(*args, **kwargs)
            wrote[name] += not all(torch.equal(*pair) for pair in pairs)
            kernel[grid](*copies[0], **copies[1])
            for mine, other in pairs:
                torch.testing.assert_close(mine, other, equal_nan=True)

        return both

    patch.setattr(KernelOverride, "__getitem__", launch)
    return wrote


def test_an_engine_computes_what_the_kernels_do(monkeypatch):
    """Prompts in chunks, trees, and chains of the requests whose sampling looks back."""
    engine = shared_engine({"num_speculative_tokens": 12}, reasoning_config=MARKERS)
    start = engine.llm.get_tokenizer().encode("class", add_special_tokens=False)
    texts = [[*text[:50], *start] for text in PROMPTS[: len(REQUESTS)]]
    common = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
    requests = [
        SamplingParams(**common | {"seed": number} | given) for number, given in enumerate(REQUESTS)
    ]
    monkeypatch.setattr(engine.core.scheduler, "max_num_scheduled_tokens", 64)
    wrote = hold_launches(monkeypatch)
    engine.generate(texts, requests)
    assert (+wrote).keys() == KERNELS
