"""Real vLLM in this process: engines with and without SpecBlock, and what they generate."""

from __future__ import annotations

import os

# Read by vLLM when it is imported, and by Triton at the first kernel it sees.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# On a GPU vLLM attends in float32 by a Triton kernel, which rounds products to TF32 unless told.
os.environ["TRITON_F32_DEFAULT"] = "ieee"

import pytest

pytest.importorskip("vllm", reason="engine tests run real vLLM")

from support.engines import Engine, shared_engine
from support.matrix import Reference
from vllm.plugins import load_general_plugins

load_general_plugins()


def pytest_collection_modifyitems(items):
    for item in items:
        if "engine" in item.path.parts:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def plain() -> Engine:
    """vLLM without us: the same runner, its own attention."""
    return shared_engine(None)


@pytest.fixture(scope="session")
def reference(plain) -> Reference:
    """What vLLM without us gives, generated once for all tests."""
    return Reference(plain)


def with_trees(**more) -> Engine:
    """The example pair with 24 nodes, which learns anew in each test; reports for each request."""
    report = {"per_request_spec_decode_metrics": "summary"}
    return shared_engine({"num_speculative_tokens": 24, **more}, **report)


@pytest.fixture
def tree() -> Engine:
    return with_trees()


@pytest.fixture
def budgeted() -> Engine:
    """Budgets follow from costs."""
    return with_trees(enable_adaptive_verification=True)
