"""Drafters of other papers that learned a moment from answers of the example target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from baselines.falcon import Falcon
from baselines.mask_blocks import DFlash, JetSpec
from safetensors.torch import load_file, save_file
from support.eagle3 import small_eagle3, speculators_json
from support.engines import TARGET

from vllm_specblock.drafters.common.checkpoint_files import CONFIG, WEIGHTS
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.drafters.eagle3.config import from_json
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.target.features import OnlineTeacher, load_target
from vllm_specblock.train.untrained import most_frequent

LAYERS, DRAFT_VOCAB = (2, 3, 4), 600
MASKS = {"layer_ids": LAYERS, "masks": 4, "mask_token_id": 2047, "num_hidden_layers": 2}
LEARNERS = {
    "falcon": (Falcon, {"layer_ids": LAYERS, "num_hidden_layers": 1}),
    "dflash": (DFlash, MASKS),
    "jetspec": (JetSpec, MASKS),
    "dspark": (DFlash, MASKS),
}


def write_learned(
    folder: Path, kind: str, asked: Sequence[list[int]], answers: Sequence[list[int]]
) -> Path:
    """Train a drafter of a kind on what the target answered; return its folder."""
    torch.manual_seed(0)
    texts = [torch.tensor([*ask[-24:], *tokens]) for ask, tokens in zip(asked, answers)]
    batch = Batch.of(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1))
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    counts = batch.tokens[batch.tokens >= 0].bincount(minlength=target.config.vocab_size)
    d2t, t2d = most_frequent(counts, DRAFT_VOCAB)
    named = t2d.nonzero()[:, 0]
    teacher = OnlineTeacher(target, LAYERS, named)
    train_batch = TrainBatch(batch, teacher.teach(batch), teacher.embed, 0, 0)
    make, sizes = LEARNERS[kind]
    head = target.get_output_embeddings().weight[named]
    learner = make.for_target(target.config, d2t, t2d, 0, head, **sizes)
    optimizer = torch.optim.Adam(learner.parameters(), 3e-3)
    for _ in range(25 if kind == "falcon" else 60):
        optimizer.zero_grad()
        learner(train_batch).loss.backward()
        optimizer.step()
    learner.save(folder)
    return as_dspark(folder) if kind == "dspark" else folder


def as_dspark(folder: Path) -> Path:
    """Give a DFlash drafter a Markov head that says little, and windows."""
    raw, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    del raw[KIND]
    raw |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "sample_from_anchor": False}
    raw |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "is_causal": False}
    for name in ("markov_w1", "markov_w2"):
        tensors[f"markov_head.{name}.weight"] = torch.randn(raw["vocab_size"], 4) * 0.2
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(raw))
    return folder


def write_peagle(folder: Path) -> Path:
    """A P-EAGLE drafter of random weights, in the speculators layout."""
    layer = {
        **json.loads((TARGET / CONFIG).read_text()),
        **{"model_type": "llama", "num_hidden_layers": 1, "head_dim": 32},
    }
    keys = {"speculators_model_type": "peagle", "mask_token_id": 2047, "draft_vocab_size": 600}
    raw = speculators_json(layer, eagle_aux_hidden_state_layer_ids=LAYERS, **keys)
    model = small_eagle3(**from_json(raw, CONFIG).model_dump())
    folder.mkdir()
    save_file(model.state_dict(), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(raw))
    return folder
