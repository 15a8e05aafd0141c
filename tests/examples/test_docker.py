"""The container files: versions that the plugin supports, and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_specblock.versions import SUPPORTED_VLLM, is_supported

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples/docker").glob("Dockerfile*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) of a file, with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [
        (line.split(maxsplit=1)[0], line.split(maxsplit=1)[1])
        for line in text.splitlines()
        if line.strip()
    ]


def test_the_gpu_image_is_of_the_release_that_tests_run_on():
    (base,) = [rest for name, rest in instructions(FILES[0]) if name == "FROM"]
    image, _, tag = base.partition(":")
    assert image == "vllm/vllm-openai" and is_supported(tag.removeprefix("v"))
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag), "no moving tag"
    tested = re.search(r'^VLLM = "(.+)"$', (ROOT / "tools/setup_env.py").read_text(), re.M)[1]
    assert tag == f"v{tested}" and next(iter(SUPPORTED_VLLM)) == tested.rpartition(".")[0]
