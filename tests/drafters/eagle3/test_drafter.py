"""The EAGLE-3 head over a paged cache drafts what a search over whole paths drafts."""

from __future__ import annotations

import pytest
import torch
from support.committed import advance, rows_of
from support.trees import texts
from vllm_specblock.triton_kernels.drafting.grow_level import LevelLimits

from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import Eagle3Model

H, V, VD, PAGE, MAX_LEN = 32, 64, 40, 8, 64
VARIANTS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "qk_norm": True,
    "qkv_bias": True,
    "mlp_bias": True,
    "logit_scale": 0.5,
}


def make_drafter(own_embedding: bool = False, **changes) -> Eagle3Model:
    torch.manual_seed(0)
    shape = Eagle3Shape(
        **{
            "hidden_size": H,
            "target_hidden_size": H,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "vocab_size": V,
            "draft_vocab_size": VD,
            "rms_norm_eps": 1e-5,
            **changes,
        }
    )
    drafter = Eagle3Model(shape, own_embedding).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
        named = torch.randperm(V)[: shape.draft_vocab_size].sort().values
        drafter.d2t.copy_(named - torch.arange(len(named)))
    return drafter


def embedding_table() -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(1))


def make_head(drafter, nodes: int = 40, lookahead: int | None = None, **options) -> Eagle3Drafter:
    table = embedding_table()
    head = Eagle3Drafter(
        drafter, lambda ids: table[ids], Eagle3Config(**options), nodes, MAX_LEN, lookahead
    )
    # Noise in the cache: nothing of it may be seen.
    head.bind([torch.randn(20, PAGE, 2, 16).transpose(1, 2) for _ in head.cache_layers()])
    return head


class Plain:
    """One text without a cache: every state is computed from the whole path before it."""

    def __init__(self, drafter: Eagle3Model, table, features, text, end: int):
        self.drafter, self.table, self.end = drafter, table, end
        self.features, self.text = features, text

    def state(self, path: list[int]) -> torch.Tensor:
        """[H], after the committed text and `path`."""
        drafter, end = self.drafter, self.end
        seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [] for _ in range(drafter.config.num_hidden_layers)
        ]

        def attend(layer, query, key, value):
            seen[layer].append((key[0], value[0]))
            return self._attention(query[0], seen[layer])[None]

        def row(token, feature, position):
            at = torch.tensor([position])
            return drafter.run(self.table[token][None], feature[None], at, attend)[0]

        for t in range(end):
            state = row(self.text[t + 1], drafter.fuse(self.features[t]), t)
        for step, token in enumerate(path):
            state = row(token, drafter.carry(state), end + step)
        return state

    @staticmethod
    def _attention(query, seen):
        out = []
        for head, one in enumerate(query):
            score = torch.stack([one @ key[head // 2] for key, _ in seen]) / one.shape[0] ** 0.5
            value = torch.stack([value[head // 2] for _, value in seen])
            out.append(score.softmax(0) @ value)
        return torch.stack(out)

    def tree(self, growth: LevelLimits, slots: int, beta: float) -> dict[tuple, float]:
        """Path -> score. A row of a later level needs one of the `slots` behind the text."""

        def children(path, score):
            logits = self.drafter.logit_scale * self.drafter.logits(self.state(list(path)))
            logprob = (beta * logits).log_softmax(-1)
            best = logprob.topk(growth.top_k)
            return {
                (*path, draft_id + int(self.drafter.d2t[draft_id])): score + float(each)
                for each, draft_id in zip(best.values, best.indices.tolist())
            }

        level = children((), 0.0)
        found = dict(level)
        for done in range(growth.depth - 1):
            best = sorted(level.items(), key=lambda node: -node[1])[: growth.width]
            level = {}
            for place, (path, score) in enumerate(best):
                if done * growth.width + place < slots:
                    level |= children(path, score)
            found |= level
        return dict(sorted(found.items(), key=lambda node: -node[1])[: growth.budget])


def assert_same_tree(tree, request: int, wanted: dict[tuple, float]) -> None:
    found = texts(tree, request)
    common = found.keys() & wanted.keys()
    assert len(found) == len(wanted)
    assert len(common) >= len(wanted) - 2, "more than a tie at the budget's cut differs"
    assert {p: found[p] for p in common} == pytest.approx({p: wanted[p] for p in common}, abs=1e-3)


def world(requests: int):
    """States of three layers, features, texts."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, requests, MAX_LEN, H, generator=draw)
    features = states.permute(1, 2, 0, 3).flatten(2)  # [R, n, 3H], low, mid, high
    return states, features, torch.randint(0, V, (requests, MAX_LEN + 1), generator=draw)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"depth": 1}, {}),
        ({"depth": 4, "top_k": 3}, {}),
        ({"depth": 5, "top_k": 1}, {}),
        ({"depth": 4, "top_k": 3, "calibrate_drafts": False}, {}),
        ({"depth": 3, "top_k": 3}, VARIANTS),
        ({"depth": 3, "top_k": 3}, {"num_hidden_layers": 3}),
        ({"depth": 3, "top_k": 2}, {"num_features": 2, "layer_ids": (1, 3)}),
    ],
)
@torch.no_grad()
def test_paged_equals_plain(options, changes):
    """Two requests, prompt in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = make_drafter(**changes)
    head = make_head(drafter, **options)
    head.beta = None if head.calibration is None else torch.tensor([1.3, 0.7])
    states, features, text = world(2)
    if drafter.config.num_features == 2:
        head.layers, features = (0, 2), torch.cat([features[..., :H], features[..., 2 * H :]], -1)
    tables = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])
    for requests, padding in (
        ([(0, 9), (0, 6)], 0),
        ([(9, 13), (6, 7)], 0),
        ([(13, 16), (7, 8)], 4),
        ([(16, 17), (8, 12)], 8),
    ):
        advance(head, rows_of(requests, tables, states, text, PAGE, padding))
        tree = head.draft()
        assert tree.token.shape == (2, 40)
        for request, (_, end) in enumerate(requests):
            plain = Plain(drafter, embedding_table(), features[request], text[request], end)
            beta = 1.0 if head.beta is None else float(head.beta[request])
            assert_same_tree(tree, request, plain.tree(head.growth, MAX_LEN - end, beta))


@pytest.mark.parametrize("room", [0, 1, 2, 5, 9])
@torch.no_grad()
def test_near_the_length_limit_nodes_without_a_slot_do_not_grow(room):
    drafter = make_drafter()
    head = make_head(drafter, depth=4, top_k=3)
    head.beta = torch.tensor([1.3])
    states, features, text = world(1)
    tables, end = torch.arange(1, 9)[None], MAX_LEN - room
    (cache,) = head.attention_builder.caches
    before = cache.clone()
    advance(head, rows_of([(0, end)], tables, states, text, PAGE))
    tree = head.draft()
    plain = Plain(drafter, embedding_table(), features[0], text[0], end)
    assert_same_tree(tree, 0, plain.tree(head.growth, room, float(head.beta[0])))
    changed = (cache != before).any(-1).any(1).any(-1).nonzero().flatten().tolist()
    assert set(changed) <= {0, *tables[0].tolist()}, "a stranger's block was written"


@torch.no_grad()
def test_no_more_slots_are_borrowed_than_are_spared():
    """Slots behind them keep their noise."""
    head = make_head(make_drafter(), nodes=40, lookahead=7, depth=4, top_k=5)
    assert head.growth.width == 2
    states, _, text = world(1)
    (cache,) = head.attention_builder.caches
    before = cache.clone()
    advance(head, rows_of([(0, 10)], torch.arange(1, 9)[None], states, text, PAGE))
    head.draft()
    flat = (cache != before).transpose(1, 2).flatten(0, 1).any(-1).any(-1)[PAGE:]
    assert flat.nonzero().flatten().tolist() == list(range(10 + 3 * 2))


@torch.no_grad()
def test_more_children_than_it_can_name_there_are_not():
    head = make_head(make_drafter(draft_vocab_size=4), depth=2, top_k=10)
    states, _, text = world(1)
    advance(head, rows_of([(0, 9)], torch.arange(1, 9)[None], states, text, PAGE))
    assert int(head.draft().size[0]) == 4 + 4 * 4


@torch.no_grad()
def test_a_checkpoints_own_embedding_is_used():
    states, _, text = world(1)
    rows = rows_of([(0, 9)], torch.arange(1, 9)[None], states, text, PAGE)
    drafter = make_drafter(own_embedding=True)
    trees = []
    for table in (embedding_table(), embedding_table() + 1):
        head = Eagle3Drafter(
            drafter, lambda ids, t=table: t[ids], Eagle3Config(depth=3), 20, MAX_LEN
        )
        head.bind([torch.zeros(20, PAGE, 2, 16).transpose(1, 2)])
        advance(head, rows)
        trees.append(texts(head.draft(), 0))
    assert trees[0] == trees[1]


def test_an_embedding_that_is_the_targets_is_not_kept_twice():
    drafter = make_drafter(own_embedding=True)
    table = drafter.embed_tokens.weight.detach().clone()
    table[-1, -1] += 1

    def embed(ids):
        return table[ids]

    head = Eagle3Drafter(drafter, embed, Eagle3Config(), 20, MAX_LEN)
    assert head.embed is drafter.embed_tokens is not None
    table.copy_(drafter.embed_tokens.weight.detach())
    head = Eagle3Drafter(drafter, embed, Eagle3Config(), 20, MAX_LEN)
    assert head.embed is embed and drafter.embed_tokens is None
