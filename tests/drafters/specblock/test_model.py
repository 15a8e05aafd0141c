"""The drafter against numbers that the SpecBlock authors' own modules gave (tests/fixtures)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.dense_cache import DenseCache
from support.records import small_drafter

from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.model import SpecBlockModel

FIXTURES = Path(__file__).parents[2] / "fixtures"
TOLERANCE = 1e-4

pytestmark = pytest.mark.filterwarnings("error")


class Variant:
    """A fixture drafter with the inputs and outputs that belong to it."""

    def __init__(self, name: str):
        self.drafter = checkpoint.load(FIXTURES / name).requires_grad_(False)
        self.config = self.drafter.config
        self.table = load_file(FIXTURES / name / "target_embed.safetensors")[
            "model.embed_tokens.weight"
        ]
        self.train = load_file(FIXTURES / f"{name}_train.safetensors")
        infer = load_file(FIXTURES / f"{name}_infer.safetensors")
        self.case = {k.removeprefix("case0."): v for k, v in infer.items() if "case0." in k}
        meta = json.loads((FIXTURES / f"{name}_meta.json").read_text())["cases"]["case0"]
        assert meta["bookkeeping"] == "aligned"
        self.catch_ups = meta["catchup"]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens.long()]

    def append(self, cache, features, tokens, keep=None):
        """Rows of block 1 as the drafter was trained on them: row i has RoPE base i + 1."""
        base = torch.arange(cache.rows, cache.rows + len(tokens)) + 1
        condition = self.drafter.condition(features)
        return self.drafter(condition, self.embed(tokens), base, cache.append(keep), keep)

    def prompt(self, keep=None):
        """The rows of case0's prompt and first token, and the cache that they leave."""
        cache = DenseCache(self.config)
        tokens = torch.cat([self.case["prompt_ids"][1:], self.case["first_token"]])
        hidden = self.append(cache, self.case["features"], tokens, keep)
        return cache, hidden

    def train_rows(self, rows: int):
        cache = DenseCache(self.config)
        hidden = self.append(
            cache, self.train["target_features"][:rows], self.train["row_tokens"][:rows]
        )
        return cache, hidden

    def with_rank_topk(self, topk) -> SpecBlockModel:
        drafter = copy.copy(self.drafter)
        drafter.config = self.config.model_copy(update={"rank_topk": topk})
        return drafter


@pytest.fixture(scope="module", params=["llama", "qwen"])
def variant(request):
    return Variant(request.param)


def assert_near(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def assert_cache(cache: DenseCache, wanted: dict[str, torch.Tensor], name: str) -> None:
    """Compare [rows, K, nkv, D] with the fixture's [nkv, rows·K, D]."""
    for layer, both in enumerate(zip(cache.key, cache.value)):
        found = [cached.flatten(0, 1).transpose(0, 1) for cached in both]
        assert_near(found, [wanted[f"{name}.layer{layer}.{x}"] for x in "kv"])


def test_block1_of_a_whole_sequence(variant):
    train = variant.train
    first_layer = []
    handle = variant.drafter.layers[0].register_forward_hook(
        lambda module, args, output: first_layer.append(output)
    )
    cache, hidden = variant.train_rows(len(train["row_tokens"]))
    handle.remove()
    names = ("layer0_out", "prenorm_hidden", "logits", "rank_logits")
    found = [*first_layer, hidden, *variant.drafter.heads(hidden)]
    assert_near(found, [train[f"block1.{name}"] for name in names])
    assert_cache(cache, train, "block1")


# Only row 0: at later rows training also looked at block 2 of the rows before, which inference does
# not have.
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (2, 3)], ids=str)
def test_later_blocks_of_the_first_training_row(variant, cuts):
    cache, hidden = variant.train_rows(1)
    growth, name = cache.grow(), ""
    for row, cut in enumerate(cuts):
        name = f"block{row + 2}.M{'_'.join(map(str, cuts[: row + 1]))}"
        attend = growth.starts(torch.tensor([row]), torch.tensor([cut - 1]))
        token = variant.embed(variant.train[f"{name}.row_tokens"][:1])
        hidden = variant.drafter(hidden[:, cut - 1], token, torch.tensor([1]), attend)
    wanted = [variant.train[f"{name}.{each}"][:1] for each in ("logits", "rank_logits")]
    assert_near(variant.drafter.heads(hidden), wanted)


@pytest.mark.parametrize("only_last", [False, True], ids=["all rows", "last row kept"])
def test_drafting_row_and_cache_of_a_prompt(variant, only_last):
    case = variant.case
    keep = torch.tensor([len(case["prompt_ids"]) - 1]) if only_last else None
    cache, hidden = variant.prompt(keep)
    assert len(hidden) == (1 if only_last else len(case["prompt_ids"]))
    logits, _ = variant.drafter.heads(hidden[-1])
    assert_near(hidden[-1], case["block1.prenorm_hidden"])
    assert_near(logits, case["block1.logits"])
    assert_cache(cache, case, "cache")


@pytest.mark.parametrize("topk", [10, 20])
def test_rank_logits(variant, topk):
    drafter = variant.with_rank_topk(topk)
    hidden = torch.stack([variant.case["block1.prenorm_hidden"]])
    assert_near(drafter.heads(hidden)[1][0], variant.case[f"block1.rank_logits_top{topk}"])
    assert_near(
        drafter.heads(variant.case["block2.prenorm_hidden"])[1],
        variant.case[f"block2.rank_logits_top{topk}"],
    )


def test_every_block2_start(variant):
    case = variant.case
    cache, hidden = variant.prompt()
    slots = case["block2.start_slots"].long()
    base = torch.full_like(slots, cache.rows)  # block 1's for every slot
    tokens = variant.embed(case["block2.start_tokens"])
    attend = cache.grow().starts(torch.zeros_like(slots), slots)
    hidden = variant.drafter(hidden[-1, slots], tokens, base, attend)
    names = ("prenorm_hidden", "logits", "rank_logits_top20")
    found = [hidden, *variant.drafter.heads(hidden)]
    assert_near(found, [case[f"block2.{name}"] for name in names])


def test_catch_up_after_a_verified_step(variant):
    case = variant.case
    after_prompt, _ = variant.prompt()
    for name, meta in variant.catch_ups.items():
        cache = copy.deepcopy(after_prompt)
        tokens = torch.cat([case[f"catchup_{name}.accepted"], case[f"catchup_{name}.bonus"]])
        keep = torch.tensor([len(tokens) - 1])
        hidden = variant.append(cache, case[f"catchup_{name}.features"], tokens, keep)
        assert cache.rows == meta["cache_rows_after"]
        assert_near(hidden[0], case[f"catchup_{name}.prenorm_hidden"])
        assert_near(variant.drafter.heads(hidden)[0][0], case[f"catchup_{name}.logits"])
    assert {"a0"} < set(variant.catch_ups)


@pytest.mark.parametrize("topk", [20, "full"])
@pytest.mark.parametrize("width", [1, 4, 32])
def test_candidates_are_what_the_heads_say(variant, topk, width):
    drafter = variant.with_rank_topk(topk)
    hidden = variant.case["block2.prenorm_hidden"]
    logits, rank_logits = drafter.heads(hidden)
    logprob, token, bucket = drafter.candidates(hidden, width)
    best, ids = logits.log_softmax(-1).topk(width)
    assert_near(logprob, best)
    assert torch.equal(token, ids + drafter.d2t[ids])
    assert torch.equal(bucket, rank_logits.argmax(-1))


def test_rank_features_over_the_full_vocabulary(variant):
    drafter = variant.with_rank_topk("full")
    hidden = variant.case["block1.prenorm_hidden"]
    fed = []
    handle = drafter.rank_head.register_forward_pre_hook(lambda m, args: fed.append(args[0]))
    logits, _ = drafter.heads(hidden)
    handle.remove()
    p = logits.softmax(-1)
    top = logits.topk(10)
    features = torch.cat(
        [
            p.gather(-1, top.indices).log(),
            top.values[:, [0]] - top.values[:, [1, 2, 4]],
            p.amax(-1, keepdim=True),
            torch.distributions.Categorical(p).entropy()[:, None],
        ],
        dim=-1,
    )
    assert_near(fed[0], torch.cat([drafter.norm(hidden), features], dim=-1))


def test_qk_norm_makes_attention_blind_to_the_scale_of_queries_and_keys():
    drafter, plain = small_drafter(0, qk_norm=True), small_drafter(0)
    plain.load_state_dict(
        {k: v for k, v in drafter.state_dict().items() if "k_norm" not in k and "q_norm" not in k}
    )
    condition, embedding, base = torch.randn(3, 32), torch.randn(3, 32), torch.arange(1, 4)

    def outputs(model):
        return model(condition, embedding, base, DenseCache(model.config).append())

    before = [outputs(drafter), outputs(plain)]
    with torch.no_grad():
        for model in (drafter, plain):
            model.layers[1].self_attn.q_proj.weight *= 3
            model.layers[1].self_attn.k_proj.weight *= 3
    assert_near(outputs(drafter), before[0])
    assert (outputs(plain) - before[1]).abs().max() > 10 * TOLERANCE


# ---- Drafters without a part of the paper's (Table 2) ----
def frozen(**changes) -> SpecBlockModel:
    return small_drafter(0, rank_topk=20, **changes).requires_grad_(False)


def test_without_broadcast_the_prefix_enters_at_position_1_alone():
    layer = frozen(prefix_broadcast=False).input_layer
    whole = frozen().input_layer
    whole.load_state_dict(layer.state_dict())
    norm = torch.nn.RMSNorm(32)
    one, two = (layer(torch.randn(3, 32), torch.randn(3, 32), norm)[0] for _ in range(2))
    assert not torch.allclose(one[:, 0], two[:, 0])
    assert torch.equal(one[:, 1:], two[:, 1:])
    condition, token = torch.randn(3, 32), torch.randn(3, 32)
    found, wanted = (each(condition, token, norm) for each in (layer, whole))
    torch.testing.assert_close(found[0][:, 0], wanted[0][:, 0])
    torch.testing.assert_close(found[1], norm(found[0]))


def test_without_shift_the_layers_follow_each_other():
    drafter = frozen(layer_shift=False)
    shifted = frozen()
    assert not [name for name in drafter.state_dict() if name.startswith("shift_proj")]
    weights = shifted.state_dict() | drafter.state_dict()
    # [I, 0] is no shift at all.
    weights["shift_proj.0.weight"] = torch.eye(32, 64)
    shifted.load_state_dict(weights)
    rows = torch.randn(3, 32), torch.randn(3, 32), torch.arange(1, 4)
    found, wanted = (d(*rows, DenseCache(d.config).append()) for d in (drafter, shifted))
    torch.testing.assert_close(found, wanted)
