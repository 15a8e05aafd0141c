"""Training drafts as inference does: same states, same losses, row by row."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_specblock.draft.cache import DenseCache
from vllm_specblock.train.features import Teaching
from vllm_specblock.train.objective import Unroll

BATCH, LENGTH = 2, 11
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture
def scene(lucky):
    def make(**changes):
        drafter, tokens = lucky(BATCH, LENGTH, **changes)
        tokens[1, 7:] = -1  # a short window
        embed = torch.nn.Embedding(drafter.config.vocab_size, drafter.config.hidden_size)
        hidden = torch.randn(BATCH, LENGTH, 3 * drafter.config.target_hidden_size)
        law = torch.randn(BATCH, LENGTH, drafter.config.draft_vocab_size).softmax(-1)
        return drafter, embed.requires_grad_(False), tokens, Teaching(hidden, law)

    return make


class Inference:
    """The same rows through `DenseCache`, one at a time, as a request would run them."""

    def __init__(self, drafter, embed, tokens, hidden):
        self.drafter, self.embed, self.tokens, self.hidden = drafter, embed, tokens, hidden
        self.path_rope = drafter.config.block_rope == "path"

    def blocks(self, cuts: list[int]):
        """Yield per row its states of every block [K, H], block b+1 started at cuts[b]."""
        cache = DenseCache(self.drafter.config)
        for row in range(len(self.tokens) - 1):
            condition = self.drafter.condition(self.hidden[row][None])
            states = [self._forward(row, 0, condition, cache.append())]
            attend, offset = cache, 0
            for block, cut in enumerate(cuts):
                offset += cut
                place = torch.tensor([cut - 1])
                attend = (
                    cache.starts(place) if block == 0 else attend.starts(torch.tensor([0]), place)
                )
                states.append(self._forward(row, offset, states[-1][cut - 1][None], attend))
            yield row, states

    def _forward(self, row, offset, condition, attend):
        place = row + 1 + offset
        token = self.tokens[place].clamp(min=0) if place < len(self.tokens) else torch.tensor(0)
        base = torch.tensor([row + 1 + (offset if self.path_rope else 0)])
        return self.drafter(condition, self.embed(token)[None], base, attend)[0]


def record(unroll):
    """Keep every forward's output and attend of an unroll."""
    seen = []
    inner = unroll.forward

    def forward(condition, embedding, base, attend):
        seen.append((attend, inner(condition, embedding, base, attend)))
        return seen[-1][1]

    unroll.forward = forward
    return seen


@pytest.mark.parametrize("rope", ["base", "path"])
@pytest.mark.parametrize("cuts", [[1], [2], [3], [4], [2, 4], [2, 1, 3]])
@torch.no_grad()
def test_states_are_those_of_inference(scene, cuts, rope):
    drafter, embed, tokens, teaching = scene(block_rope=rope)
    unroll = Unroll(drafter, embed, tokens, teaching, mask_restart=True)
    seen = record(unroll)
    unroll.objective(cuts, rank=False)

    expected = {
        (window, row, block): state
        for window in range(BATCH)
        for row, states in Inference(
            drafter, embed, tokens[window], teaching.hidden[window]
        ).blocks(cuts)
        for block, state in enumerate(states)
    }
    compared = 0
    for block, (attend, hidden) in enumerate(seen):
        rows = torch.arange(LENGTH - 1).expand(BATCH, -1) if block == 0 else attend.row
        hidden = hidden.view(*rows.shape, *hidden.shape[1:])
        for window in range(BATCH):
            for place, row in enumerate(rows[window].tolist()):
                if row + 1 + sum(cuts[:block]) < LENGTH:  # else its token is unknown
                    torch.testing.assert_close(
                        hidden[window, place], expected[window, row, block], **CLOSE
                    )
                    compared += 1
    assert len(seen) == len(cuts) + 1
    assert compared > BATCH * LENGTH


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("cuts", [[1], [3], [1, 2], [2, 1]])
@torch.no_grad()
def test_objective_is_the_loop_over_rows(scene, cuts, restart):
    """Eqs. 5-7 with labels, laws and cuts, from states that inference computed."""
    drafter, embed, tokens, teaching = scene()
    counted = [[[] for _ in range(4)] for _ in range(len(cuts) + 1)]
    for window in range(BATCH):
        text = [None if token < 0 else token for token in tokens[window].tolist()]
        named = drafter.t2d.nonzero()[:, 0].tolist()
        label = [named.index(token) if token in named else None for token in text] + [None] * 20
        rows = Inference(drafter, embed, tokens[window], teaching.hidden[window]).blocks(cuts)
        for row, states in rows:
            alive, offset = True, 0
            for block, state in enumerate(states):
                on_path = []
                for k in range(1, 5):
                    place = row + 1 + offset + k
                    alive = alive and label[place] is not None
                    on_path.append(alive)
                    if not alive:
                        continue
                    logits = drafter.heads(state[k - 1])[0].double()
                    p = logits.softmax(-1).tolist()
                    law = teaching.law[window, place - 1].tolist()
                    loss = -sum(a * math.log(b) for a, b in zip(law, p))
                    counted[block][k - 1].append(loss)
                    alive = p.index(max(p)) == label[place]
                if block < len(cuts):
                    cut = cuts[block]
                    after = label[row + 1 + offset + cut] is not None
                    alive = after if restart else on_path[cut - 1]
                    offset += cut
                    if not alive:
                        break
    expected = [
        sum(sum(losses) / len(losses) for losses in positions if losses) for positions in counted
    ]
    assert len(counted[-1][0]) > 2  # the last block was reached

    objective = Unroll(drafter, embed, tokens, teaching, mask_restart=restart).objective(
        cuts, rank=False
    )
    assert [block.draft.sum().item() for block in objective.blocks] == pytest.approx(
        expected, rel=1e-5
    )
    assert objective.loss.item() == pytest.approx(sum(expected), rel=1e-5)
    for block, positions in zip(objective.blocks, counted):
        assert block.on_path.sum(0).tolist() == [len(losses) for losses in positions]


def test_a_later_block_teaches_the_first(scene):
    """The condition of block 2 carries its gradient into block 1's query of the cut."""
    drafter, embed, tokens, teaching = scene()
    objective = Unroll(drafter, embed, tokens, teaching, mask_restart=True).objective([1], False)
    objective.blocks[1].draft.sum().backward()
    assert drafter.input_layer.condition_proj.weight.grad.abs().sum() > 0


def test_without_a_live_path_the_later_blocks_are_left_out(scene):
    drafter, embed, tokens, teaching = scene()
    outside = (~drafter.t2d).nonzero()[0, 0]
    objective = Unroll(drafter, embed, torch.full_like(tokens, outside), teaching).objective(
        [2, 2], rank=True
    )
    assert len(objective.blocks) == 1
    assert objective.loss == 0
