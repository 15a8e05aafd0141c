"""`make contract`: the hooks against a release's wheel."""

from __future__ import annotations

import contract
import pytest


def test_the_installed_vllm_has_all_hooks(capsys):
    pytest.importorskip("vllm")
    assert contract.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]
