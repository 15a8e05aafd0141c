"""A drafter is found by its name, and one that is not there is told from those that are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm_specblock.config import OptionError, parse_drafter, split_keys
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import (
    DRAFTERS,
    DrafterOptions,
    WeightedOptions,
    drafter_kind,
    register_drafter,
)

OURS = [
    *("specblock", "eagle3", "dflash", "jetspec", "medusa", "parallelspec", "falcon", "sps"),
    "ngram",
]


@pytest.fixture
def toy(monkeypatch):
    """The options of a drafter of kind "toy", whose module loads when somebody asks for it."""

    @register_drafter("toy", "toy_drafter:Toy")
    class ToyConfig(DrafterOptions):
        width: int = 2

        @classmethod
        def defaults_for(cls, num_nodes):
            return {"width": num_nodes}

    module = ModuleType("toy_drafter")
    module.Toy = type("Toy", (Drafter,), {"kind": "toy"})
    monkeypatch.setitem(sys.modules, "toy_drafter", module)
    yield ToyConfig
    del DRAFTERS["toy"]


def test_a_registered_drafter_is_found_by_its_name(toy):
    first, second, _ = split_keys({"method": "specblock", "kind": "toy", "width": 3})
    assert first == {"kind": "toy", "width": 3} and second is None
    assert parse_drafter({"width": 3}, "toy") == toy(width=3)
    assert parse_drafter({}, "toy", num_nodes=9).width == 9
    found = drafter_kind("toy")
    assert found.options is toy and found.load_class() is sys.modules["toy_drafter"].Toy
    with pytest.raises(OptionError, match=r"'depth' is not known; accepted of a drafter of kind"):
        parse_drafter({"depth": 3}, "toy")


def test_an_unknown_name_is_told_from_those_that_are_known(toy):
    known = ", ".join([*OURS, "toy"])
    with pytest.raises(ValueError) as error:
        drafter_kind("hydra")
    assert str(error.value) == f"There is no drafter of kind 'hydra': choose one of {known}."
    with pytest.raises(OptionError, match=f"'kind' is 'hydra', but must be one of {known}"):
        split_keys({"kind": "hydra"})


def test_a_name_is_registered_once(toy):
    with pytest.raises(ValueError, match="a drafter of kind 'toy' already"):
        register_drafter("toy", "another:Toy")(toy)


def test_the_registry_names_what_is_there():
    assert list(DRAFTERS) == OURS
    for name, kind in DRAFTERS.items():
        made = kind.load_class()
        assert issubclass(made, Drafter) and made.kind == name
        assert issubclass(kind.options, WeightedOptions) == (kind.checkpoint is not None)
        if kind.checkpoint is not None:
            files = kind.load_checkpoint_module()
            assert all(hasattr(files, f) for f in ("read_config", "check_tensors", "load"))
