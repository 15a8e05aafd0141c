"""Heads that draft on purpose what a real one would not: for the exactness of verification."""

from __future__ import annotations

import random

import pytest
import torch
from support.engines import Engine, Output
from support.matrix import PROMPTS
from support.trees import to_tree

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.engine.runner.draft_policy import DraftPolicy
from vllm_specblock.tree import DraftTree


class ScriptedHead(Drafter):
    """Knows what will be generated, and hides it in a tree, or does not.

    Args:
        future: token ids of the prompt → ids that plain decoding generates after it.
        kind: "scattered": the true continuation as a random path among random nodes, some of
            them duplicate siblings; "deep": the true continuation as one chain of the greatest
            depth; "twins": every node twice, true path included; "empty": no node.
        speculator: the engine's, asked for the requests' tokens so far.
    """

    def __init__(self, kind: str, future: dict[tuple[int, ...], list[int]], speculator):
        self.kind, self.future, self.speculator = kind, future, speculator
        self.num_nodes = speculator.num_speculative_tokens
        self.max_depth = speculator.tree_states.max_depth
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.draw = random.Random(0)
        self.vocab = speculator.vocab_size

    def advance(self, rows: CommittedTokens) -> None:
        """Has nothing to take in."""

    def draft(self) -> DraftTree:
        trees = [self._one(req_idx) for req_idx in self.slots.tolist()]
        return to_tree(trees, self.num_nodes, self.slots.device)

    def _one(self, req_idx: int) -> list[tuple[int, int]]:
        """(parent, token) of each node."""
        states = self.speculator.req_states
        length = int(states.total_len.gpu[req_idx])
        prompt = int(states.prompt_len.np[req_idx])
        so_far = states.all_token_ids.gpu[req_idx, :length].tolist()
        known = self.future.get(tuple(so_far[:prompt]), [])
        ahead = known[length - prompt :] if known[: length - prompt] == so_far[prompt:] else []
        ahead = ahead[: self.max_depth]
        if self.kind == "empty":
            return []
        if self.kind == "deep":
            return list(enumerate(ahead))[: self.num_nodes]
        if self.kind == "twins":
            nodes, tips = [], (0, 0)
            for what in ahead[: self.num_nodes // 2]:
                nodes += [(tips[0], what), (tips[1], what)]
                tips = (len(nodes) - 1, len(nodes))
            return nodes
        return self._scatter(ahead[: self.draw.randint(0, self.max_depth)])

    def _scatter(self, path: list[int]) -> list[tuple[int, int]]:
        """A random tree of all node slots, with `path` in some of them."""
        nodes: list[tuple[int, int]] = []
        depth, tip, ahead = [0], 0, iter(path)
        slots = set(self.draw.sample(range(self.num_nodes), len(path)))
        for slot in range(self.num_nodes):
            if slot in slots:
                up, what, tip = tip, next(ahead), slot + 1
            else:
                up = self.draw.choice([n for n, d in enumerate(depth) if d < self.max_depth])
                siblings = [token for parent, token in nodes if parent == up]
                again = siblings and self.draw.random() < 0.2
                what = self.draw.choice(siblings) if again else self.draw.randrange(3, self.vocab)
            nodes.append((up, what))
            depth.append(depth[up] + 1)
        return nodes


def install(
    patch: pytest.MonkeyPatch, engine: Engine, kind: str, expected: list[list[Output]]
) -> None:
    """Put a scripted head in the engine's place, which knows what `PROMPTS` are answered with."""
    future = {tuple(text): answer.tokens for text, (answer,) in zip(PROMPTS, expected)}
    speculator = engine.speculator
    head = ScriptedHead(kind, future, speculator)
    propose = speculator.propose

    def noting(input_batch, *args, **kwargs):
        head.slots = input_batch.idx_mapping
        return propose(input_batch, *args, **kwargs)

    policy = DraftPolicy([head], None, speculator.skipped, head.num_nodes, head.max_depth)
    patch.setattr(speculator, "draft_policy", policy)
    patch.setattr(speculator, "propose", noting)
