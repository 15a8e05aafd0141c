"""Too few compared tokens fail a session, whichever workers compared them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = "from support.compared import *\nfrom support.compared import pytest_testnodedown\n"
TESTS = """
from types import SimpleNamespace
import pytest
from support import compared

check = SimpleNamespace(tokens=0)
compared.counters.append(check)

@pytest.mark.parametrize("number", range(6))
def test_some(number):
    check.tokens += 10

def test_enough():
    compared.require(LEAST)
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("least", "status"), [(60, 0), (61, 1)])
def test_all_workers_count(tmp_path, workers, least, status):
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(TESTS.replace("LEAST", str(least)))
    library = Path(__file__).parent / "lib"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}", tmp_path],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == status, result.stdout + result.stderr
    words = "too few" if status else "enough"
    assert f"60 tokens compared, {words}: at least {least} wanted" in result.stdout
    assert "7 passed" in result.stdout
