"""`specblock adapt`: `run`, `list` and `use`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adapting import Pair
from support.scripts import specblock

from vllm_specblock.adapt.link.folder_link import FolderLink
from vllm_specblock.adapt.versions import VersionFolder


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


@pytest.fixture
def recorded(pair, tmp_path) -> Path:
    """A folder with 24 requests."""
    folder = tmp_path / "requests"
    versions = VersionFolder(folder / "versions", pair.drafter, pair.target)
    link = FolderLink(folder, versions, slots=64)
    for number in range(24):
        link.offer(*pair.request(number))
    link.close()
    return folder


def train(pair: Pair, folder: Path, *more: str | int | Path):
    base = ["--drafter", pair.drafter, "--target", pair.target, "--once", "--seconds", 0]
    return specblock("adapt", "run", folder, *base, "--policy", "always", "--actions", "all", *more)


def test_versions_are_learned_listed_and_chosen(pair, recorded):
    result = train(pair, recorded)
    assert result.exit_code == 0, result.output
    assert "updates_full" in result.stdout and not list(recorded.glob("request-*"))
    out = recorded / "versions"
    name = VersionFolder(out).current()
    told = specblock("adapt", "list", out).stdout.splitlines()
    assert told[1].split() == ["delivered"]
    assert told[2].split()[:3] == ["version-00001", "delivered", "full"] and len(told) == 5
    assert told[4].split()[:4] == ["*", name, "version-00002", "full"]
    # The trainer goes on from there.
    again = train(pair, recorded)
    assert again.exit_code == 0 and VersionFolder(out).current() == name
    result = specblock("adapt", "use", out, "delivered")
    assert result.exit_code == 0 and "delivered is current" in result.stdout
    assert VersionFolder(out).current() is None
    assert specblock("adapt", "list", out).stdout.splitlines()[1].split() == ["*", "delivered"]
    assert specblock("adapt", "use", out, name).exit_code == 0
    assert VersionFolder(out).current() == name


def test_wrong_folders_versions_and_policies_are_one_sentence(pair, recorded, tmp_path):
    for result, message in (
        (train(pair, tmp_path / "none"), "There is no folder"),
        (train(pair, recorded, "--policy", "osd"), "no policy 'osd'"),
        (train(pair, recorded, "--actions", "trunk"), "must be heads or all"),
        (train(pair, recorded, "--memory", "inf"), "must be above 0 and finite"),
        (train(pair, recorded, "--device", "gpu"), "The device gpu cannot be used"),
        (specblock("adapt", "use", recorded, "version-00009"), "no version version-00009"),
    ):
        assert result.exit_code == 1
        assert message in result.stderr and "Traceback" not in result.stderr
    for command in ("use", "no/folder", "delivered"), ("list", "no/folder"):
        result = specblock("adapt", *command)
        assert result.exit_code == 2 and "'no/folder' does not exist" in result.stderr
    assert len(list(recorded.glob("request-*"))) == 24
