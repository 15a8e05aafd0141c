"""What a drafter of any registered kind is made of."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm_specblock.config import NGramConfig, SpecBlockConfig
from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.runner.build import load_drafter


def test_options_of_any_kind_come_back_whole():
    drafters = (
        ResolvedDrafter(kind="specblock", folder="x", options=SpecBlockConfig(num_starts=3)),
        ResolvedDrafter(kind="ngram", folder=None, options=NGramConfig(depth=5)),
    )
    resolved = ResolvedConfig(drafters=drafters)
    dumped = resolved.model_dump(mode="json")
    assert dumped["drafters"][1]["options"]["depth"] == 5
    assert ResolvedConfig.model_validate(dumped) == resolved


def test_a_drafter_without_weights():
    resolved = ResolvedDrafter(kind="ngram", folder=None, options=NGramConfig(depth=5))
    config = SimpleNamespace(
        num_speculative_tokens=7, model_config=SimpleNamespace(max_model_len=64)
    )
    made = load_drafter(config, resolved, (), 7, torch.nn.Identity(), None, torch.device("cpu"))
    assert isinstance(made, NGramDrafter)
    assert (made.num_nodes, made.max_depth, made.max_model_len) == (7, 5, 64)
