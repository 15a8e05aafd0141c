"""What the ranks of a tensor-parallel engine say to each other."""

from __future__ import annotations

import json
import subprocess
import sys

RANK = """
import json, sys
from torch import distributed
from vllm_specblock.engine.ranks import Ranks

number, store = int(sys.argv[1]), distributed.FileStore(sys.argv[2], 2)
distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
ranks, large = Ranks(distributed.group.WORLD), 2**62 - 1
alike = [ranks.alike(each) for each in (7, number, large, -large, large * (1 - 2 * number))]
print(json.dumps([ranks.first, alike, ranks.from_first([large - number, 3 + number])]))
"""


def test_ranks_agree_and_the_first_decides(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(number), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    rest = [[True, False, True, True, False], [2**62 - 1, 3]]
    assert said == [[True, *rest], [False, *rest]]
