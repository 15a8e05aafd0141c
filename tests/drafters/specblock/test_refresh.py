"""A refreshed drafter is, bit for bit and where it was, what loading its weights anew gives."""

from __future__ import annotations

import pytest
import torch
from support.engines import DRAFTER, ROOT
from support.lone_drafters import head_of

from vllm_specblock.drafters.common.linear import Fp8Linear, Int8Linear, PackedLinear
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.config import DrafterConfig, TargetInfo
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import HEADS, RefreshError, refresh

SECOND = ROOT / "examples/two_heads/tables"
MAPPING = ("d2t", "t2d")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def held(drafter) -> dict[str, torch.Tensor]:
    """Every tensor below a module, however it is held."""
    found = {}
    for name, module in drafter.named_modules():
        for kind in (module._parameters, module._buffers, module.__dict__):
            tensors = {key: each for key, each in kind.items() if torch.is_tensor(each)}
            found |= {f"{name}.{key}": each for key, each in tensors.items()}
    return found


def values(drafter) -> dict[str, torch.Tensor]:
    """Copies of all tensors, as bytes where torch cannot compare them otherwise."""
    copies = {}
    for name, tensor in held(drafter).items():
        tensor = tensor.to_dense() if tensor.is_mkldnn else tensor.detach().clone()
        copies[name] = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return copies


def assert_equal(drafter, wanted: dict[str, torch.Tensor]) -> None:
    found = values(drafter)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def addresses(drafter) -> dict[str, int]:
    """Of all tensors; the object itself stands for a packed one, which no graph can read."""
    return {
        name: id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        for name, tensor in held(drafter).items()
    }


def served(directory, dtype=torch.float32, quantization=None) -> SpecBlockModel:
    return process_after_loading(checkpoint.load(directory, dtype, "cpu").eval(), quantization)


def weights(directory) -> dict[str, torch.Tensor]:
    tensors = checkpoint.read_tensors(directory, checkpoint.read_config(directory))
    return {name: tensor for name, tensor in tensors.items() if name not in MAPPING}


def heads_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(HEADS)}


@pytest.fixture
def write(tmp_path):
    """Writes a drafter of random weights; returns its folder."""

    def writing(seed: int, dtype: torch.dtype = torch.float32, **changes) -> str:
        config = DrafterConfig(
            **{
                "hidden_size": 32,
                "target_hidden_size": 24,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "block_size": 5,
                "vocab_size": 70,
                "draft_vocab_size": 40,
                "target": TargetInfo(hidden_size=24, vocab_size=70, layer_ids=(1, 2, 3)),
            }
            | changes
        )
        drafter, draw = SpecBlockModel(config), torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.data.normal_(std=0.3, generator=draw)
        checkpoint.save(drafter.to(dtype), tmp_path / str(seed))
        return tmp_path / str(seed)

    return writing


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"layer_shift": False, "prefix_broadcast": False}],
    ids=["plain", "Qwen3's norms", "ablations"],
)
def test_all_weights(write, changes, stored, dtype, quantization):
    drafter = served(write(1, stored, **changes), dtype, quantization)
    before, old = addresses(drafter), values(drafter)
    other = write(2, stored, **changes)
    refresh(drafter, weights(other))
    wanted = values(served(other, dtype, quantization))
    assert_equal(drafter, wanted)
    assert addresses(drafter) == before
    same = {name for name in old if torch.equal(old[name], wanted[name])}
    assert same == {".d2t", ".t2d", "rotary.turn", "rotary.offset"}, "the two drafters are alike"


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_heads_alone(write, dtype, quantization):
    drafter = served(write(1), dtype, quantization)
    before, old = addresses(drafter), values(drafter)
    new = weights(write(2))
    refresh(drafter, heads_of(new))
    other = write(3)
    mixed = checkpoint.load(other)
    mixed.load_state_dict(weights(write(1)) | heads_of(new), strict=False)
    checkpoint.save(mixed, other)
    assert_equal(drafter, values(served(other, dtype, quantization)))
    assert addresses(drafter) == before
    changed = {
        name for name, tensor in values(drafter).items() if not torch.equal(tensor, old[name])
    }
    assert changed and all(name.startswith(HEADS) for name in changed)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_examples_there_and_back(dtype, quantization):
    """In sizes at which products are split and packed."""
    drafter = served(DRAFTER, dtype, quantization)
    kinds = {type(module) for module in drafter.modules()}
    assert (Fp8Linear in kinds) == (quantization == "fp8")
    packs = PackedLinear.packs() and dtype == torch.bfloat16 and quantization is None
    assert (PackedLinear in kinds) == packs
    start, places = values(drafter), addresses(drafter)
    refresh(drafter, weights(SECOND))
    wanted = values(served(SECOND, dtype, quantization))
    assert_equal(drafter, wanted | {f".{name}": start[f".{name}"] for name in MAPPING})
    refresh(drafter, weights(DRAFTER))
    assert_equal(drafter, start)
    assert addresses(drafter) == places


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
def test_the_examples_in_integers_of_eight_bits():
    pytest.importorskip("vllm._C")
    drafter = served(DRAFTER, torch.bfloat16, "int8")
    assert isinstance(drafter.lm_head, Int8Linear)
    assert type(drafter.input_layer.condition_proj) is PackedLinear, "the target's states"
    start, places = values(drafter), addresses(drafter)
    refresh(drafter, weights(SECOND))
    wanted = values(served(SECOND, torch.bfloat16, "int8"))
    assert_equal(drafter, wanted | {f".{name}": start[f".{name}"] for name in MAPPING})
    assert addresses(drafter) == places


def test_what_is_given_is_neither_kept_nor_changed(write):
    drafter, new = served(write(1)), weights(write(2))
    copies = {name: tensor.clone() for name, tensor in new.items()}
    refresh(drafter, new)
    after = values(drafter)
    assert all(torch.equal(new[name], copies[name]) for name in new)
    for tensor in new.values():
        tensor.zero_()
    assert_equal(drafter, after)


@pytest.mark.parametrize("loads", [False, True], ids=["loaded outside", "loaded in inference mode"])
@pytest.mark.parametrize("serves", [False, True], ids=["called outside", "called within a step"])
def test_in_inference_mode_and_out_of_it(write, loads, serves):
    first, other = write(1), write(2)
    with torch.inference_mode(loads):
        drafter = served(first)
    with torch.inference_mode(serves):
        refresh(drafter, weights(other))
    assert_equal(drafter, values(served(other)))


def spoil(name: str, value: float):
    def spoiling(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    return spoiling


def without(name: str):
    return lambda tensors: tensors.pop(name)


def with_more(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({name: tensor})


LAST = "rank_head.2.weight"
REFUSED = {
    "NaN in the last": (spoil(LAST, float("nan")), rf"^The new {LAST} holds NaN or inf"),
    "NaN in a stack": (
        spoil("layers.2.self_attn.v_proj.weight", float("nan")),
        r"^The new layers\.2\.self_attn\.v_proj\.weight holds NaN",
    ),
    "infinite": (spoil("lm_head.weight", float("inf")), r"^The new lm_head\.weight holds NaN"),
    "minus infinite": (spoil("norm.weight", float("-inf")), r"^The new norm\.weight holds NaN"),
    "finite in another dtype": (spoil("norm.weight", 1e39), r"in torch\.float32\.$"),
    "too large to fold": (
        lambda tensors: tensors["input_layer.fuse.weight"].fill_(3e38),
        r"^What input_layer\.fuse makes of the new queries holds NaN",
    ),
    "a shape": (with_more(LAST, torch.zeros(4, 255)), r"has shape \[4, 255\], but .* \[4, 256\]"),
    "broadcastable": (with_more("norm.weight", torch.zeros(1)), r"has shape \[1\], but"),
    "unknown": (with_more("lm_head.bias", torch.zeros(40)), r"hold lm_head\.bias, which"),
    "the mapping": (with_more("d2t", torch.zeros(40).long()), r"hold d2t, which"),
    "missing": (without("norm.weight"), r"lack norm\.weight: they must be all"),
    "half of the heads": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "lm_head" not in name],
        r"lack rank_head\.0\.weight, rank_head\.2\.weight: they must",
    ),
    "heads and a norm": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("layers")],
        r"lack layers\.0",
    ),
    "nothing": (lambda tensors: tensors.clear(), r"lack lm_head\.weight"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_refused_before_anything_is_written(write, why, quantization):
    drafter = served(write(1), quantization=quantization)
    old, (change, said) = values(drafter), REFUSED[why]
    new = {name: tensor.double() for name, tensor in weights(write(2)).items()}
    change(new)
    with pytest.raises(RefreshError, match=said) as error:
        refresh(drafter, new)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    assert_equal(drafter, old)


def test_a_drafter_that_does_not_serve_is_refused(write):
    drafter = checkpoint.load(write(1))
    with pytest.raises(RefreshError, match="made ready to serve"):
        refresh(drafter, weights(write(2)))


def test_heads_of_another_kind_refuse():
    from vllm_specblock.config import NGramConfig

    for head in (head_of("eagle3")[0], NGramDrafter(NGramConfig(), 8, 64)):
        with pytest.raises(ValueError, match=f"^{type(head).__name__} keeps the weights"):
            head.refresh(weights(DRAFTER))
