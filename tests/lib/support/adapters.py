"""LoRA adapters of the example pair's target, and an engine's arguments with them."""

from __future__ import annotations

from pathlib import Path

from lib.adapters import LINEAR, RANK, write_adapter
from vllm.lora.request import LoRARequest

# As many adapters as there are slots: none of them is empty.
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def in_turn(folder: Path, count: int) -> list[LoRARequest | None]:
    """None, an adapter of all linear layers, one of few layers, embedding and LM head, None, …"""
    one = write_adapter(folder / "one", 1, LINEAR)
    two = write_adapter(folder / "two", 2, ["q_proj", "v_proj", "embed_tokens", "lm_head"])
    each = None, LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two))
    return [each[i % len(each)] for i in range(count)]
