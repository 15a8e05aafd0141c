"""Stored target outputs: training without the target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.batch import NO_TOKEN, Batch
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.target.feature_store import Features, FeatureStore
from vllm_specblock.train.target.features import TargetOutputs, target_probs_of


class StoredTeacher:
    """Gives what `OnlineTeacher` gives, from features that `specblock features` wrote.

    Of the target it reads the embedding, which it keeps on `device`, and the rows of the LM head
    that the distribution needs.

    Args:
        folder: the features.
        target: folder of the target that they are of.
        draft_ids: [Vd] int64, the target ids of the draft vocabulary.
        device, dtype: of everything that is given out but the distribution, which is fp32.
        layer_ids, length, data: what the features must have been extracted with (`data` is
            `feature_store.fingerprint` of the sequences); None is any.

    Raises:
        TrainError: the folder is not whole, or is of another target, layers, length or data.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        draft_ids: Tensor,
        device: torch.device | str,
        dtype: torch.dtype,
        layer_ids: tuple[int, int, int] | None = None,
        length: int | None = None,
        data: str | None = None,
    ) -> None:
        self.store = FeatureStore(
            folder,
            target=target_rows.fingerprint(target),
            layer_ids=layer_ids,
            length=length,
            data=data,
        )
        self.device, self.dtype = torch.device(device), dtype
        self.head = target_rows.head_rows(target, draft_ids).to(self.device, dtype)
        self.embedding = target_rows.embedding_rows(target).to(self.device, dtype)

    @torch.no_grad()
    def teach(self, batch: Batch) -> TargetOutputs:
        """Features of a batch on any device; zeros past each window's last document.

        Raises:
            TrainError: a piece of the batch is not on disk, or has other tokens there.
        """
        hidden, last = (rows.to(self.device, self.dtype) for rows in self._gather(batch))
        return TargetOutputs(hidden, last, self.target_probs(last))

    @torch.no_grad()
    def target_probs(self, last: Tensor) -> Tensor:
        return target_probs_of(last, self.head)

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.embedding)

    def _gather(self, batch: Batch) -> Features:
        """[B, L, 3·Ht] and [B, L, Ht] in host memory, in the dtype of the files."""
        gathered = self.store.zeros(*batch.tokens.shape)
        tokens = torch.full(batch.tokens.shape, NO_TOKEN, dtype=torch.int32)
        for window, segments in enumerate(batch.segments):
            column = 0
            for segment in segments:
                features, seen = self.store.read(segment)
                here = slice(column, column + segment.length)
                gathered.hidden[window, here] = features.hidden
                gathered.last[window, here] = features.last
                tokens[window, here] = seen
                column += segment.length
        # After the reading: a batch on a GPU has to be waited for here.
        if not torch.equal(tokens, batch.tokens.int().cpu()):
            raise TrainError(
                f"The features in {self.store.folder} are of other data: tokens of this batch "
                "differ from those that the target has seen."
            )
        return gathered
