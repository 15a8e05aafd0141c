"""New weights on their way to a GPU: every step has all of one set, and none waits."""

from __future__ import annotations

import random
import time
from hashlib import sha256

import pytest
import torch
from support.late_device import LateDevice
from support.records import small_drafter

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.specblock import device_refresh, refresh
from vllm_specblock.drafters.specblock.device_refresh import DeviceRefresh
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import HEADS, RefreshError, held

FORMS = [(torch.float32, None), (torch.float16, None), (torch.float32, "fp8")]
"""On a CPU weights in bfloat16 are packed for it unless they are in 8 bits."""


def served(seed: int, dtype=torch.float32, quantization=None) -> SpecBlockModel:
    return process_after_loading(small_drafter(seed).eval().to(dtype), quantization)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in small_drafter(seed).named_parameters()}


def heads(seed: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights(seed).items() if name.startswith(HEADS)}


def values(drafter: SpecBlockModel) -> dict[str, str]:
    """A digest of every tensor, bit for bit."""
    return {
        name: sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:8]
        for name, value in held(drafter)
    }


class Serving:
    """A drafter, and steps of a late device that note what they see of it."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, form=FORMS[0]):
        self.drafter, self.draw = served(0, *form), random.Random(seed)
        self.device = LateDevice(seed)
        self.device.install(patch, device_refresh)
        self.refresh = DeviceRefresh(self.drafter)
        self.device.own([self.refresh._staging, *(value for _, value in held(self.drafter))])
        self.seen: list[dict[str, str]] = []

    def step(self) -> None:
        self.device.launch(lambda: self.seen.append(values(self.drafter)))
        self.device.go_on(self.draw.choice([0, 1, 3, 9]))

    def take(self, tensors) -> float | None:
        """Bring weights in while it serves; None if they were refused."""
        self.refresh.start(tensors)
        for _ in range(10_000):
            try:
                seconds = self.refresh.turn()
            except RefreshError:
                return None
            self.step()
            if seconds is not None:
                return seconds
            time.sleep(1e-4)  # a thread makes them ready
        raise AssertionError("the weights never came")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_step_has_all_of_one_set(monkeypatch, form, seed):
    serving = Serving(seed, monkeypatch, form)
    addresses = {name: value.data_ptr() for name, value in held(serving.drafter)}
    wanted = [values(served(number, *form)) for number in range(5)]
    new = {name: value for name, value in wanted[3].items() if name.startswith(HEADS)}
    wanted[3] = wanted[2] | new
    with serving.device:
        for number in range(1, 5):
            given = heads(number) if number == 3 else weights(number)
            assert serving.take(given) == pytest.approx(1e-3)
        serving.device.finish()
    assert {name: value.data_ptr() for name, value in held(serving.drafter)} == addresses
    mixed = [seen for seen in serving.seen if seen not in wanted]
    assert not mixed, "a step saw parts of two sets"
    order = [wanted.index(seen) for seen in serving.seen]
    assert order == sorted(order) and set(order) == set(range(5))


def test_what_cannot_serve_is_refused_and_what_comes_next_is_not(monkeypatch):
    serving = Serving(0, monkeypatch)
    before, broken = values(serving.drafter), weights(1)
    broken["norm.weight"] = broken["norm.weight"] * float("nan")
    with serving.device:
        assert serving.take(broken) is None
        assert serving.take({"norm.weight": weights(1)["norm.weight"]}) is None
        serving.device.finish()
        assert values(serving.drafter) == before
        assert serving.take(weights(2)) is not None
        serving.device.finish()
    assert values(serving.drafter) == values(served(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_stops_nothing(monkeypatch):
    serving = Serving(0, monkeypatch)
    monkeypatch.setattr(serving.refresh, "_part", None)
    with serving.device:
        assert serving.take(weights(1)) is None
    assert serving.refresh.turn() is None


def test_the_heads_alone_are_one_copy_of_their_size(monkeypatch):
    serving = Serving(0, monkeypatch)
    serving.refresh._host.fill_(0xFF)
    serving.refresh._staging.zero_()
    with serving.device:
        serving.take(heads(1))
        serving.device.finish()
    sizes = {name: value.nbytes for name, value in held(serving.drafter)}
    ours = sum(size for name, size in sizes.items() if name.startswith(HEADS))
    copied = int(serving.refresh._staging.nonzero().max()) + 1
    assert copied < ours + 256 * len(sizes) < sum(sizes.values())


def test_weights_for_a_gpu_are_not_packed_for_the_host(monkeypatch):
    """In bfloat16 a CPU's own products want another layout; what is brought to a GPU keeps its."""
    drafter = served(0, torch.bfloat16)
    preparation = refresh.Preparation(drafter)
    packs = [value.is_mkldnn for value in preparation.prepare(weights(1)).values()]
    assert any(packs) == PackedLinear.packs()
    preparation.serves = torch.device("cuda")
    ready = preparation.prepare(weights(1))
    assert not any(value.is_mkldnn for value in ready.values())
    assert torch.equal(ready["lm_head.weight"], weights(1)["lm_head.weight"].bfloat16())
