"""The drafters' models in vLLM's workers: loading, weight updates, and sleep that discards them.

vLLM loads updates into parameters of the checkpoint's names and shapes, which a folded drafter
lacks. `sleep(level=2)` keeps named buffers only: unverified trees, learned statistics and folded
weights are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces_base import VllmModel

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import refresh
from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.config.resolved_config import ResolvedConfig
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.engine.target_model import embedding_of, target_head_weight


def load_drafters(
    config: VllmConfig, resolved: ResolvedConfig, target_model: VllmModel, device: torch.device
) -> list[Drafter]:
    """Load the drafters of an engine, with room for what they learn of each request slot."""
    target, combine = config.model_config, resolved.combine
    num_nodes, embed = config.num_speculative_tokens, embedding_of(target_model)
    budgets = (num_nodes,) if combine is None else combine.shares(num_nodes)
    drafters: list[Drafter] = []
    for each, budget in zip(resolved.drafters, budgets):
        kind, options = drafter_kind(each.kind), each.options
        given: list[Any] = [options, budget, target.max_model_len]
        if kind.checkpoint is not None:
            files = kind.load_checkpoint_module()
            model = files.load(each.folder, dtype=target.dtype, device=device).eval()
            if getattr(model, "wants_head", False):
                model.share_head(target_head_weight(target_model))
            process_after_loading(model, getattr(options, "quantization", None))
            columns = tuple(resolved.layers.index(layer) for layer in each.layers)
            # A request has N slots after its root for drafting.
            given = [model, embed, *given, num_nodes, columns]
        drafter = kind.load_class()(*given)
        if drafter.calibration is not None:
            drafter.calibration.make_room(config.scheduler_config.max_num_seqs + 1)
        drafters.append(drafter)
    return drafters


class DraftModels(nn.ModuleList):
    """The networks of an engine's drafters. Updates are for the first drafter."""

    def __init__(self, drafters: list[Drafter], resolved: ResolvedConfig) -> None:
        super().__init__([each.model for each in drafters if each.model is not None])
        self.first, self.resolved = drafters[0], resolved
        self.received: dict[str, Tensor] = {}

    def begin_update(self) -> None:
        """Raise ValueError unless the first drafter can take weights from outside."""
        if self.first.kind != "specblock":
            raise ValueError(
                f"start_draft_weight_update needs a drafter of kind 'specblock', but 'kind' is "
                f"{self.first.kind!r}: choose another drafter."
            )
        if self.resolved.adapting is not None:
            raise ValueError(
                "start_draft_weight_update and the speculative_config key 'adapt' both change the "
                "drafter: drop 'adapt', or choose a version with specblock adapt use."
            )
        self.received = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep tensors of an update; vLLM may reuse their memory for the next ones."""
        self.received |= {name: tensor.clone() for name, tensor in weights}

    def finish_update(self) -> None:
        """Let the received weights serve; raises ValueError if they do not fit."""
        received, self.received = self.received, {}
        assert isinstance(self.first.model, SpecBlockModel)  # by `begin_update`
        refresh(self.first.model, received)


def install() -> None:
    """In our engines, send updates through `DraftModels` and refuse deep sleep. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    @replaces(Worker, "start_draft_weight_update")
    def start_draft_weight_update(original: Function, self: Worker) -> None:
        if is_ours(self.vllm_config.speculative_config):
            self.get_draft_model().begin_update()
        original(self)

    @replaces(Worker, "finish_weight_update")
    def finish_weight_update(original: Function, self: Worker) -> None:
        drafts = is_ours(self.vllm_config.speculative_config) and self._weight_update_is_draft
        original(self)
        if drafts:
            self.get_draft_model().finish_update()

    @replaces(Worker, "sleep")
    def sleep(original: Function, self: Worker, level: int = 1) -> None:
        if level >= 2 and is_ours(self.vllm_config.speculative_config):
            raise ValueError(
                f"SpecBlock does not support sleep(level={level}), which discards a drafter's "
                "weights and the trees' buffers: take level 1, or a new engine."
            )
        original(self, level)
