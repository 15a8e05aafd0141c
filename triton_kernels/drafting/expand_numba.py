"""Tree growth for CPUs, one call per block of the drafter.

See `expand.py`; the torch reference is `vllm_specblock.drafters.specblock.growth.Expansion`, bit
for bit except invalid starts.
"""

from __future__ import annotations

import numpy as np
import torch

from ..op import views
from ..optional_numba import njit
from ..tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    FIRST,
    MAX_DEPTH,
    PATH_FACTOR,
    ROOT_HASH,
)
from ..tree.select_tree import Candidates, TreeTensors
from ..tree.select_tree_numba import select_numba
from .expand import Growing, NextStarts

_DEPTH = MAX_DEPTH * DEPTH_ONE


class CompiledGrowing(Growing):
    """Growing in host memory. Differs in what `attach` launches."""

    def attach(
        self,
        starts: NextStarts | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
        bucket: torch.Tensor | None = None,
    ) -> NextStarts | TreeTensors:
        self.block += 1
        shape, requests, block = self.shape, self.num_requests, self.block
        if starts is None:
            node = torch.zeros(requests, 1, dtype=torch.int64)
            valid = torch.ones(requests, 1, dtype=torch.bool)
        else:
            node, valid = starts.node, starts.valid
        if bucket is None:
            bucket = token.new_zeros(token.shape[:3])
        fields = (*self.fields[:5].numpy(), self.score.numpy(), self.started.numpy())
        given = (node, valid, logprob.float(), token, bucket)
        _attach_block(
            *fields,
            self.branching.numpy(),
            *(x.detach().contiguous().numpy() for x in given),
            block,
            shape.count(block - 1),
            block < shape.num_blocks and not shape.by_level,
        )
        if block == shape.num_blocks:
            own, path_hash, key, parent = self.fields[:4]
            texts = None if shape.by_level else path_hash
            return select_numba(Candidates(own, parent, self.score, key, texts), shape.budget)
        size = requests, shape.num_starts
        dtypes = [torch.int64] * 4 + [torch.bool]
        made = NextStarts._make([torch.empty(size, dtype=dtype) for dtype in dtypes])
        _choose_starts(
            *fields[:3],
            *fields[4:5],
            fields[6],
            views(made),
            1 if shape.by_level else block,
            shape.count(block - 1) if shape.by_level else 1,
            shape.count(block),
            shape.block_size,
            shape.width,
        )
        return made


@njit
def _attach_block(
    token,  # [R, C] int64, as the four that follow
    path_hash,
    key,
    parent,
    start_key,
    score,  # [R, C] fp32
    started,  # [R, ≥ M−2, S] int64
    branching,  # [4] int64
    start_node,  # [R, rows] int64
    start_valid,  # [R, rows] bool
    top_logprob,  # [R, rows, K, B] fp32
    top_token,  # [R, rows, K, B] int64
    bucket,  # [R, rows, K] int64
    block,
    first,  # the candidate of row 0
    reopens,  # later blocks may start from any block's nodes
):
    requests, rows, positions, width = top_token.shape
    bits = score.view(np.int32)
    for r in range(requests):
        if block == 1:
            token[r, 0] = key[r, 0] = parent[r, 0] = 0
            path_hash[r, 0], score[r, 0] = ROOT_HASH, 0
        for row in range(rows):
            node, valid = start_node[r, row], start_valid[r, row]
            if reopens and block > 1:
                started[r, block - 2, row] = path_hash[r, node] if valid else ROOT_HASH
            above = score[r, node] if valid else np.float32(-np.inf)
            text, deep = path_hash[r, node], key[r, node] & _DEPTH
            for k in range(positions):
                wanted = branching[bucket[r, row, k]]
                at = first + (row * positions + k) * width
                for b in range(width):
                    c = at + b
                    gain = min(top_logprob[r, row, k, b], np.float32(0))
                    score[r, c] = above + gain if b < max(wanted, 1) else np.float32(-np.inf)
                    token[r, c] = top_token[r, row, k, b]
                    path_hash[r, c] = token[r, c] + text * PATH_FACTOR
                    parent[r, c] = node
                    # Absolute value: a score is at most 0.
                    key[r, c] = np.int64(bits[r, c] & 0x7FFFFFFF) << 32
                    key[r, c] += deep + (k + 1) * DEPTH_ONE + c
                    start_key[r, c] = key[r, c] if wanted > 0 else key[r, c] | CLOSED
                # The main chain goes on from row 0 of every block, which starts at its last end.
                if reopens and row == 0 and k == positions - 1:
                    start_key[r, at] |= FIRST
                node, above, text = at, score[r, at], path_hash[r, at]


@njit
def _choose_starts(
    token,  # [R, C] int64, as the three that follow
    path_hash,
    key,
    start_key,
    started,  # [R, ≥ M−2, S] int64
    made,  # NextStarts
    block,  # the attached block; 1: no text has started a block, and no two are equal
    first_open,  # candidate, from which on blocks may start
    count,  # candidates so far, the root included
    block_size,
    width,
):
    requests, starts = made.node.shape
    best, chosen = np.empty(starts, np.int64), np.empty(starts, np.int64)
    for r in range(requests):
        best[:], chosen[:] = CLOSED, first_open
        for c in range(first_open, count):
            now = start_key[r, c]
            if now >= best[starts - 1]:
                continue
            if block > 1:
                # The best candidate of each text, unless a block has started from the text.
                again = (started[r, : block - 1] == path_hash[r, c]).any()
                for d in range(count):
                    again |= (path_hash[r, d] == path_hash[r, c]) & (key[r, d] < key[r, c])
                if again:
                    continue
            s = starts - 1
            while s > 0 and best[s - 1] > now:
                best[s], chosen[s] = best[s - 1], chosen[s - 1]
                s -= 1
            best[s], chosen[s] = now, c
        for s in range(starts):
            c = chosen[s]
            made.node[r, s], made.token[r, s], made.valid[r, s] = c, token[r, c], best[s] < CLOSED
            row = (c - 1) // width
            made.row[r, s], made.position[r, s] = row // block_size, row % block_size
