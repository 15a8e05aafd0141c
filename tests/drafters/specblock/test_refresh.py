"""A refreshed drafter is, bit for bit and where it was, what loading its weights anew gives."""

from __future__ import annotations

import pytest
import torch
from support.records import small_drafter
from support.refreshed import served, values, weights
from support.tensors import assert_equal

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.drafters.specblock.refresh import HEADS, RefreshError, held, refresh

MAPPING = ("d2t", "t2d")
FORMS = [
    *((dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((dtype, "fp8") for dtype in (torch.float32, torch.bfloat16)),
]


def addresses(drafter) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in held(drafter)}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"layer_shift": False, "prefix_broadcast": False}],
    ids=["plain", "Qwen3's norms", "ablations"],
)
@pytest.mark.parametrize("alone", [False, True], ids=["all weights", "the heads"])
def test_it_is_what_loading_gives(form, changes, alone):
    mixed = small_drafter(1, **changes)
    drafter = served(small_drafter(1, **changes), *form)
    places, old = addresses(drafter), values(drafter)
    new = weights(small_drafter(2, **changes))
    new = {name: x for name, x in new.items() if not alone or name.startswith(HEADS)}
    refresh(drafter, {name: tensor.double() for name, tensor in new.items()})
    mixed.load_state_dict(new, strict=False)
    assert_equal(values(drafter), values(served(mixed, *form)))
    if PackedLinear not in {type(module) for module in drafter.modules()}:
        assert addresses(drafter) == places, "a graph reads these"
    same = {name for name, tensor in values(drafter).items() if torch.equal(tensor, old[name])}
    assert same >= {*MAPPING, "rotary.turn", "rotary.offset"}
    for name, kept in (("lm_head.weight", False), ("layers.1.mlp.down_proj.weight", alone)):
        assert (name in same) == kept or not old[name].numel()  # packed weights cannot be read


@pytest.mark.parametrize("loads", [False, True], ids=["loaded outside", "loaded in inference mode"])
@pytest.mark.parametrize("serves", [False, True], ids=["called outside", "called within a step"])
def test_in_inference_mode_and_out_of_it(loads, serves):
    with torch.inference_mode(loads):
        drafter = served(small_drafter(1))
    with torch.inference_mode(serves):
        refresh(drafter, weights(small_drafter(2)))
    assert_equal(values(drafter), values(served(small_drafter(2))))


def spoil(name: str, value: float):
    def spoiling(tensors):
        tensors[name].view(-1)[-1] = value

    return spoiling


def without(*parts: str):
    return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(parts)]


def with_more(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({name: tensor})


LAST = "rank_head.2.weight"
REFUSED = {
    "NaN in the last": (spoil(LAST, float("nan")), rf"^The new {LAST} holds NaN or inf"),
    "NaN in a stack": (
        spoil("layers.1.self_attn.v_proj.weight", float("nan")),
        r"^The new layers\.1\.self_attn\.v_proj\.weight holds NaN",
    ),
    "minus infinite": (spoil("norm.weight", float("-inf")), r"^The new norm\.weight holds NaN"),
    "finite in another dtype": (spoil("norm.weight", 1e39), r"in torch\.float32\.$"),
    "too large to fold": (
        lambda tensors: tensors["input_layer.fuse.weight"].fill_(3e38),
        r"^What input_layer\.fuse makes of the new queries holds NaN",
    ),
    "broadcastable": (with_more("norm.weight", torch.zeros(1)), r"has shape \[1\], but .* has \["),
    "unknown": (with_more("lm_head.bias", torch.zeros(40)), r"hold lm_head\.bias, which"),
    "the mapping": (with_more("d2t", torch.zeros(40).long()), r"hold d2t, which"),
    "missing": (without("norm."), r"lack norm\.weight: they must be all"),
    "half of the heads": (
        without("rank", "layers", "norm", "input", "shift"),
        r"lack rank_head\.0\.weight, rank_head\.2\.weight: they must",
    ),
    "heads and a norm": (without("layers"), r"lack layers\.0"),
    "nothing": (lambda tensors: tensors.clear(), r"lack lm_head\.weight"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_refused_before_anything_is_written(why, quantization):
    drafter = served(small_drafter(1), quantization=quantization)
    old, (change, said) = values(drafter), REFUSED[why]
    new = {name: tensor.double() for name, tensor in weights(small_drafter(2)).items()}
    change(new)
    with pytest.raises(RefreshError, match=said) as error:
        refresh(drafter, new)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    assert_equal(values(drafter), old)


def test_a_drafter_that_does_not_serve_is_refused():
    with pytest.raises(RefreshError, match="made ready to serve"):
        refresh(small_drafter(1), weights(small_drafter(2)))
