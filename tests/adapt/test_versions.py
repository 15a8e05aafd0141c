"""Versions as folders: they load like any drafter; incomplete ones are reported and skipped."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch
from support.adapting import VOCAB, Pair
from support.records import small_drafter

from vllm_specblock.adapt.files import lock_folder
from vllm_specblock.adapt.versions import KEPT, VersionFolder
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import provenance
from vllm_specblock.train.config import TrainError

FACTS = {"parent": None, "action": "heads", "rows": 12, "gain": 0.5}


@pytest.fixture
def folder(pair, tmp_path) -> VersionFolder:
    made = VersionFolder(tmp_path / "out", pair.drafter, pair.target)
    made.lock()
    return made


def other_drafter(seed: int = 8):
    return small_drafter(seed, vocab=VOCAB)


def test_a_version_is_a_drafter_with_its_provenance(folder):
    drafter = other_drafter()
    name = folder.write(drafter, FACTS)
    assert name == "version-00001" and folder.current() is None
    folder.use(name)
    assert folder.current() == name
    path = folder.out / name
    loaded, read = checkpoint.load(path), folder.read(name)
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert read.keys() == dict(drafter.named_parameters()).keys()
    assert all(torch.equal(read[key], value) for key, value in drafter.named_parameters())
    assert list(folder.read(name, lambda key: key == "lm_head.weight")) == ["lm_head.weight"]
    told = json.loads((path / "provenance.json").read_text())
    assert told["adaptation"].items() >= FACTS.items() and "torch" in told["versions"]
    assert folder.write(drafter, {**FACTS, "parent": name}) == "version-00002"
    assert [each["parent"] for each in folder.listed().values()] == [None, name]


def test_only_the_owner_can_look(folder):
    name = folder.write(other_drafter(), FACTS)
    folder.use(name)
    for path in (folder.out, *folder.out.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_made_for_a_look(pair, tmp_path):
    folder = VersionFolder(tmp_path / "none", pair.drafter, pair.target)
    assert folder.current() is None and folder.listed() == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("place, name", [(provenance, "write"), (Path, "rename"), (Path, "chmod")])
def test_a_writer_that_is_killed_leaves_no_version_that_is_not_whole(
    folder, monkeypatch, place, name
):
    folder.use(folder.write(other_drafter(), FACTS))

    class Killed(BaseException): ...

    def kill(*_) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, name, kill)
        folder.write(other_drafter(), FACTS)
    assert folder.names() == ["version-00001"] == [folder.current()]
    folder.unlock()
    folder.lock()
    assert not list(folder.out.glob(".version-*"))
    assert folder.write(other_drafter(), FACTS) == "version-00002"


def flipped(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def without(name: str):
    return lambda folder: (folder / name).unlink()


def garbage(folder: Path) -> None:
    (folder / "provenance.json").write_text('{"adaptation": {"fingerprints": 3}}')


@pytest.mark.parametrize(
    "harm, message",
    [
        (flipped, "not those that were written"),
        (without("model.safetensors"), "not those that were written"),
        (without("provenance.json"), "not whole"),
        (garbage, "not whole"),
        (shutil.rmtree, "no version version-00002"),
    ],
)
def test_what_is_not_whole_is_not_used(folder, harm, message):
    folder.write(other_drafter(), FACTS)
    name = folder.write(other_drafter(9), FACTS)
    folder.use(name)
    harm(folder.out / name)
    assert folder.current() == name
    with pytest.raises(TrainError, match=message) as error:
        folder.use(name)
    assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 3}', '{"version": "../drafter"}'])
def test_a_current_file_that_says_nothing_is_refused(folder, content):
    (folder.out / "current.json").write_text(content)
    with pytest.raises(TrainError, match=r"cannot be read|no version"):
        folder.read(folder.current())


@pytest.mark.parametrize("what", ["drafter", "target"])
def test_a_version_of_others_is_not_used(pair, folder, what, tmp_path):
    folder.use(folder.write(other_drafter(), FACTS))
    other = Pair.make(tmp_path / "other", seed=4)
    if what == "target":
        config = other.target / "config.json"
        config.write_text(config.read_text().replace("8", "9"))
    given = {"drafter": pair.drafter, "target": pair.target, what: getattr(other, what)}
    found = VersionFolder(folder.out, **given)
    with pytest.raises(TrainError, match=f"made for another {what}"):
        found.read(found.current())


def test_weights_that_are_not_finite_are_not_used(folder):
    drafter = other_drafter()
    drafter.norm.weight.data[2] = float("nan")
    name = folder.write(drafter, FACTS)
    with pytest.raises(TrainError, match="not finite"):
        folder.use(name)
    assert folder.current() is None


def test_a_writer_that_is_dying_is_waited_for(tmp_path):
    """A killed process keeps its files until its last thread is gone."""
    held = lock_folder(tmp_path)
    threading.Timer(0.2, os.close, (held,)).start()
    os.close(lock_folder(tmp_path))


def test_old_versions_go_but_never_the_current_one(folder):
    drafter = other_drafter()
    names = [folder.write(drafter, FACTS) for _ in range(KEPT + 3)]
    folder.use(names[0])
    folder.prune()
    assert list(folder.listed()) == [names[0], *names[3:]]
    assert not list(folder.out.glob(".version-*"))


def test_wrong_folders(pair, tmp_path):
    with pytest.raises(TrainError, match="cannot be read"):
        VersionFolder(tmp_path / "out", tmp_path / "none", pair.target)
    with pytest.raises(TrainError, match="cannot be read"):
        VersionFolder(tmp_path / "out", pair.drafter, tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainError, match="give one of your own"):
        VersionFolder(tmp_path / "file" / "out", pair.drafter, pair.target).lock()
