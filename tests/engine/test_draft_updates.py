"""A drafter's weights in vLLM's workers: updates, and sleep that would discard them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.engines import DRAFTER, ROOT, TARGET
from support.lone_drafters import head_of
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.refresh import HEADS, RefreshError, held, refresh
from vllm_specblock.engine import draft_models

SECOND = ROOT / "examples/two_heads/tables"


class Transfer(WeightTransferEngine):
    """Loads tensors as vLLM's engines for NCCL and CUDA IPC do, out of memory that it reuses."""

    def init_transfer_engine(self, init_info):
        """Nothing to connect to."""

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        self.receive_weights(update_info)

    def receive_weights(self, update_info):
        for name, tensor in update_info.items():
            sent = tensor.clone()
            self.model.load_weights([(name, sent)])
            sent.zero_()

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        """Nothing to close."""


def worker(drafter, adapting=None, speculative=True) -> Worker:
    """A worker with a drafter, between two steps."""
    draft_models.install()
    given = {"method": "specblock", "model": str(DRAFTER)} if speculative else None
    args = EngineArgs(
        model=str(TARGET), max_model_len=512, enforce_eager=True, speculative_config=given
    )
    made = Worker.__new__(Worker)
    made.vllm_config = args.create_engine_config()
    made.speculative_config = made.vllm_config.speculative_config
    models = draft_models.DraftModels([drafter], SimpleNamespace(adapting=adapting))
    made.model_runner = SimpleNamespace(
        get_draft_model=lambda: models, reset_lora_state=lambda: None
    )
    target = torch.nn.Linear(2, 2)
    made.weight_transfer_engine = Transfer(None, made.vllm_config, torch.device("cpu"), target)
    made._weight_update_active = made._weight_update_is_draft = False
    return made


def weights(directory, prefix=("",)) -> dict[str, torch.Tensor]:
    tensors = checkpoint.read_tensors(directory, checkpoint.read_config(directory))
    return {k: v for k, v in tensors.items() if k not in ("d2t", "t2d") and k.startswith(prefix)}


def update(updated: Worker, tensors: dict[str, torch.Tensor]) -> None:
    updated.start_draft_weight_update()
    updated.update_weights(tensors)
    updated.finish_weight_update()


@pytest.mark.parametrize(
    ("prefix", "dtype"),
    [(("",), torch.float32), (HEADS, torch.float32), (HEADS, torch.bfloat16)],
    ids=["all", "heads", "heads in bfloat16"],
)
def test_an_update_serves_what_a_refresh_serves(prefix, dtype):
    heads = []
    for _ in range(2):
        head, _ = head_of("specblock")
        process_after_loading(head.model.to(dtype), None)
        heads.append(head)
    updated, new = worker(heads[0]), weights(SECOND, prefix)
    assert updated.supports_draft_weight_updates()
    places = {name: tensor.data_ptr() for name, tensor in held(heads[0].model)}
    update(updated, new)
    if dtype == torch.float32:  # packed layers are replaced
        assert {name: t.data_ptr() for name, t in held(heads[0].model)} == places
    refresh(heads[1].model, new)
    draw = torch.Generator().manual_seed(0)
    config = heads[0].model.config
    hidden = torch.randn(5, config.block_size, config.hidden_size, generator=draw).to(dtype)
    for mine, wanted in zip(*(each.model.candidates(hidden, 8) for each in heads)):
        assert torch.equal(mine, wanted)


def test_an_update_that_does_not_fit_changes_nothing():
    head, _ = head_of("specblock")
    process_after_loading(head.model, None)
    before = {name: tensor.clone() for name, tensor in held(head.model)}
    updated, new = worker(head), weights(SECOND)
    lacking = {name: tensor for name, tensor in new.items() if name != "norm.weight"}
    with pytest.raises(RefreshError, match=r"lack norm\.weight"):
        update(updated, lacking)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(head.model))
    update(updated, new)  # the next session works


@pytest.mark.parametrize(
    ("kind", "adapting", "said"),
    [("specblock", object(), r"'adapt'.*adapt use\.$"), ("eagle3", None, "'kind' is 'eagle3'")],
)
def test_updates_are_refused_before_they_begin(kind, adapting, said):
    refused = worker(head_of(kind)[0], adapting)
    with pytest.raises(ValueError, match=rf"^start_draft_weight_update.*{said}"):
        refused.start_draft_weight_update()
    assert not refused._weight_update_active


def test_sleep_of_level_two_is_refused_for_trees_alone(monkeypatch):
    ours = worker(head_of("specblock")[0])
    with pytest.raises(ValueError, match=r"sleep\(level=2\).*take level 1, or a new engine\.$"):
        ours.sleep(2)

    def reached():
        raise InterruptedError

    monkeypatch.setattr(torch.accelerator, "synchronize", reached)  # vLLM's first call
    for others, level in ((ours, 1), (worker(head_of("specblock")[0], speculative=False), 2)):
        with pytest.raises(InterruptedError):
            others.sleep(level)
