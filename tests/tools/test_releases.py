"""Other releases of vLLM: the hooks, the image."""

from __future__ import annotations

import re
from pathlib import Path

import contract
import pytest

from vllm_specblock.versions import SUPPORTED_VLLM, is_supported


def test_the_installed_vllm_has_all_hooks(capsys):
    pytest.importorskip("vllm")
    assert contract.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]


ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_image_is_of_the_release_that_tests_run_on():
    text = (ROOT / "examples/docker/Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.+)$", text, re.M)
    image, _, tag = base.partition(":")
    assert image == "vllm/vllm-openai" and is_supported(tag.removeprefix("v"))
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag), "no moving tag"
    tested = re.search(r'^VLLM = "(.+)"$', (ROOT / "tools/setup_env.py").read_text(), re.M)[1]
    assert tag == f"v{tested}" and next(iter(SUPPORTED_VLLM)) == tested.rpartition(".")[0]
