"""Drafters of other papers that learned a moment from answers of the example target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from baselines.falcon import Falcon
from baselines.mask_blocks import DFlash, JetSpec
from support.engines import TARGET

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
    for _ in range(60 if kind in ("dflash", "jetspec") else 25):
        optimizer.zero_grad()
        learner(train_batch).loss.backward()
        optimizer.step()
    learner.save(folder)
    return folder
