"""Methods by name: engine arguments, environment, drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.methods import BUILT_IN, resolve
from vllm_specblock.config import parse_combine, parse_drafter, split_keys


@pytest.fixture
def drafters(tmp_path) -> dict[str, Path]:
    """A folder for every drafter that a built-in method needs."""
    names = ("specblock", "eagle3", "dflash", "jetspec", "sps", "medusa", "parallelspec", "falcon")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    return {name: tmp_path / name for name in names}


def methods(make_config, *names, **changes):
    return resolve(make_config({}, method=("plain", *names), **changes))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_method_is_one_that_the_plugin_takes(make_config, drafters, name):
    names = [] if name == "plain" else [name]
    method = methods(make_config, *names, drafter=drafters, nodes=24)[name]
    assert bool(method.speculative) != name.startswith("plain")
    assert method.env["VLLM_USE_V2_MODEL_RUNNER"] == (None if name == "plain" else "1")
    if method.speculative.get("method") != "specblock":
        return
    assert method.speculative["num_speculative_tokens"] == 24
    first, second, combine = split_keys(method.speculative)
    for head in filter(None, (first, second)):
        assert head.get("kind") == "ngram" or Path(head["model"]).is_dir()
        assert parse_drafter({k: v for k, v in head.items() if k not in ("kind", "model")}, "ngram")
    assert parse_combine(combine)


def test_a_method_of_ones_own_changes_a_built_in_one(make_config):
    define = {
        "deep": {"base": "eagle3-chain", "speculative": {"model": "x"}, "engine": {"a": 1}},
        "ngram": {"base": "ngram", "speculative": {"branches": 2, "kind": None}},
    }
    found = methods(make_config, "deep", "ngram", define=define, nodes=7)
    assert found["ngram"].speculative == {
        "method": "specblock",
        "enable_adaptive_verification": False,
        "branches": 2,
        "num_speculative_tokens": 7,
    }
    assert found["ngram"].env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    chain = {"method": "eagle3", "model": "x", "num_speculative_tokens": 3}
    assert found["deep"].speculative == chain and found["deep"].engine == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": ("ngram",)}, "plain vLLM, which is not among the methods"),
        ({"method": ("plain", "xyz")}, "There is no method xyz; there are plain, .*falcon"),
        ({"method": ("plain", "eagle3")}, "The method eagle3 needs --drafter eagle3=FOLDER"),
        (
            {"method": ("plain", "eagle3"), "drafter": {"eagle3": "nowhere"}},
            "The drafter eagle3=nowhere is no folder",
        ),
        (
            {"method": ("plain", "a"), "define": {"a": {"base": "b"}, "b": {}}},
            "There is no method b",
        ),
        (
            {"method": ("plain", "a"), "define": {"a": {"speculative": {"model": "x"}}}},
            "The method a has a speculative_config without 'method'",
        ),
    ],
)
def test_what_cannot_be_served(make_config, changes, says):
    with pytest.raises(BenchError, match=says) as error:
        resolve(make_config({}, **changes))
    assert "\n" not in str(error.value)


def test_a_drafter_trained_again_needs_a_folder_of_its_own(make_bench, drafters):
    make_bench({}, drafter=drafters)
    make_bench({}, drafter=drafters)
    (drafters["eagle3"] / "model.safetensors").write_bytes(b"again")
    with pytest.raises(BenchError, match="has results with other drafter eagle3: give another"):
        make_bench({}, drafter=drafters)
