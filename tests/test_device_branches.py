"""What only a GPU would run, put together: kernels draft and record what is without them.

Each kernel is held to its reference elsewhere. Here the branches of a whole draft are taken one
after the other, so that what one leaves is what the next one reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.device_branches import NODES, ROOT, STEPS, copy_for_a_gpu

pytest.importorskip("triton")

HEADS = (
    "SpecBlock",
    "three blocks along the path",
    "EAGLE-3",
    "n-gram",
    "trie",
    "disjoint",
    "route",
)


def drafted(out, first_on_the_path, **environment) -> tuple[dict, Path]:
    """What was drafted and recorded, and the package that did it."""
    paths = os.pathsep.join(map(str, (*first_on_the_path, ROOT / "tests/lib")))
    subprocess.run(
        [sys.executable, "-m", "support.device_branches", out],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        check=True,
        cwd=out.parent,
    )
    found = torch.load(out)
    return found, Path(found["package"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run where they belong")
def test_kernels_draft_and_record_what_is_without_them(tmp_path):
    copy = copy_for_a_gpu(tmp_path / "copy")
    plain, where = drafted(tmp_path / "plain.pt", ())
    assert not where.is_relative_to(copy)
    kernels, where = drafted(tmp_path / "kernels.pt", (copy,), TRITON_INTERPRET="1")
    assert where.is_relative_to(copy)
    # Held against plain lists where they were made: see `tests/adapt/test_slabs.py`.
    recorded = plain["recorded"], kernels["recorded"]
    assert all(seen["records"] > 3 and not seen["late"] for seen in recorded)
    assert recorded[1]["on the way"] > 3
    plain, kernels = plain["trees"], kernels["trees"]
    assert len(plain) == len(kernels) == len(HEADS) * len(STEPS)
    for place, (wanted, found) in enumerate(zip(plain, kernels, strict=True)):
        head = HEADS[place % len(HEADS)]
        assert wanted["size"].max() >= NODES // 2 or head in ("n-gram", "EAGLE-3"), head
        for name in ("size", "token", "parent", "depth"):
            assert torch.equal(found[name].long(), wanted[name].long()), (head, name)
        assert torch.equal(found["ancestors"], wanted["ancestors"]), head
        torch.testing.assert_close(found["logprob"], wanted["logprob"], atol=1e-4, rtol=1e-4)
