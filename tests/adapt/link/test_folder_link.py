"""The folder between engine and trainer, and versions in it: private, bounded, whole when read."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapting import VOCAB, Pair, staged, wait
from support.records import random_record, small_drafter

from vllm_specblock.adapt import versions as versions_module
from vllm_specblock.adapt.files import lock_folder
from vllm_specblock.adapt.link import folder_link
from vllm_specblock.adapt.link.finished import Finished
from vllm_specblock.adapt.link.folder_link import FolderLink, FolderSource, make_shared_folder
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.versions import KEPT, VersionFolder
from vllm_specblock.drafters.common.checkpoint_files import WEIGHTS
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import provenance
from vllm_specblock.train.config import TrainError

REQUEST = FinishedRequest(1.5, 7, 19, 0.1 + 0.2)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "requests"


@pytest.fixture
def versions(pair, folder) -> VersionFolder:
    made = pair.versions(folder / "versions")
    made.lock()
    return made


def link_of(pair: Pair, folder: Path, **more) -> FolderLink:
    return FolderLink(folder, pair.versions(folder / "versions"), **{"slots": 64, **more})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("request-*"))


def same(record, other) -> bool:
    for one, two in zip(vars(record).values(), vars(other).values(), strict=True):
        alike = torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
        if not alike or getattr(one, "dtype", None) != getattr(two, "dtype", None):
            return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_come_out_as_they_went_in_and_their_files_are_gone(pair, folder, caplog, dtype):
    link = link_of(pair, folder)
    assert "text can be read" in caplog.text
    records = [random_record(f"r {n} ü", rows=1 + n, prompt=0, seed=n) for n in range(5)]
    records = [replace(r, states=r.states.to(dtype), last=r.last.to(dtype)) for r in records]
    given = [*((record, REQUEST) for record in records), (None, REQUEST), (records[0], None)]
    assert all(link.offer(*each) for each in given) and not link.offer(None, None)
    link.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(files(folder)) == len(given)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}
    source = FolderSource(folder)
    for record, request in given:
        found = source.next()
        assert found.request == request
        assert found.record is None if record is None else same(found.record, record)
    assert source.next() is None and not files(folder)


def test_what_has_no_room_is_not_written(pair, folder):
    room = 50_000
    link = link_of(pair, folder, room=room)
    record, request = pair.request(1)
    taken = 0
    for _ in range(6):
        taken += link.offer(record, request)
        wait(link._waiting.empty)
        time.sleep(0.01)
    link.close()
    assert 1 <= len(files(folder)) < 6 and not link.offer(record, request)
    assert taken == len(files(folder)) + link.counts["dropped_records"]
    assert sum(path.stat().st_size for path in files(folder)) <= room


def test_an_engine_that_offers_faster_than_a_disk_drops(pair, folder, monkeypatch):
    monkeypatch.setattr(FolderLink, "_write", lambda self, message: time.sleep(0.05))
    link = link_of(pair, folder, slots=2)
    began = time.perf_counter()
    taken = [link.offer(*pair.request(1)) for _ in range(8)]
    assert time.perf_counter() - began < 0.3 and not all(taken)
    link.close()


def test_files_that_cannot_be_read_are_dropped(pair, folder):
    link = link_of(pair, folder)
    for number in range(4):
        link.offer(*pair.request(number))
    link.close()
    first, second, third, _ = files(folder)
    first.write_bytes(first.read_bytes()[:700])
    second.write_bytes(b"\\0" * 64)
    message = Finished.load(third)
    Finished(None, None).save(third)
    Finished(replace(message.record, request=7), message.request).save(first)  # no id, but whole
    source = FolderSource(folder)
    assert [source.next().record.request, source.next().record] == [7, None]
    assert source.next().record.request == "request 3"
    assert source.tally["dropped_records"] == 1 and not files(folder)
    with pytest.raises(TrainError, match="no folder"):
        FolderSource(folder / "none")


def test_one_engine_writes_to_a_folder(pair, folder):
    link = link_of(pair, folder)
    with pytest.raises(TrainError, match=r"Another engine or trainer uses the folder.*own\.$"):
        link_of(pair, folder)
    link.close()
    left = folder / ".request-1.safetensors"
    left.write_text("half a request")  # of an engine that was killed
    link_of(pair, folder).close()
    assert not left.exists()
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(TrainError, match=r"cannot be used \(.*give one of your own\.$"):
        link_of(pair, folder)


def test_both_ends_tell_each_other_what_they_count(pair):
    link = pair.link()
    source = FolderSource(link.folder)
    source.count("updates_full", 3)
    source.count("judged_gain_millitokens", -5)
    source.tell()
    assert wait(lambda: link.counts["updates_full"]) == 3
    assert link.counts["judged_gain_millitokens"] == -5
    link.took(folder_link.StagedVersion(1, 0, Action.HEADS, {}), 0.25)
    assert source.swap_seconds(Action.HEADS) == 0.25
    assert source.swap_seconds(Action.FULL) == 0.0
    assert FolderSource(link.folder).tally["updates_full"] == 3, "a later trainer counts on"
    link.close()


def test_a_folder_in_shared_memory_goes_with_its_engine(pair):
    link = pair.link()
    assert link.folder.parent == folder_link.SHARED_MEMORY
    assert stat.S_IMODE(link.folder.stat().st_mode) == 0o700
    other = pair.link()  # which leaves the first one alone
    assert link.folder.is_dir()
    link.close()
    assert not link.folder.exists() and other.folder.is_dir()
    os.close(other._lock)  # as a kill does
    third = pair.link()
    assert not other.folder.exists()
    third.close()


@pytest.mark.parametrize("where", ["small", "none"])
def test_too_little_shared_memory_is_one_sentence(tmp_path, monkeypatch, where):
    monkeypatch.setattr(folder_link, "SHARED_MEMORY", tmp_path if where == "small" else Path("/no"))
    with pytest.raises(TrainError, match=r"MiB left, but .* needs .* name a folder .*\.$"):
        make_shared_folder(1, 1 << 60)
    assert not list(tmp_path.iterdir())


def test_heads_alone_are_read_where_the_trunk_serves_already(pair, folder, versions):
    def offer(seed: int, trunk: str | None) -> None:
        facts = {"parent": None, **({} if trunk is None else {"trunk": trunk})}
        versions.use(versions.write(small_drafter(seed, vocab=VOCAB), facts))

    link = link_of(pair, folder)
    offer(1, "delivered")
    heads = staged(link)
    assert heads.action is Action.HEADS
    assert set(heads.tensors) == {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}
    link.took(heads)
    offer(2, None)  # another trunk, which the engine did not take in time
    offer(3, versions.listed()["version-00002"]["checksum"])
    full = staged(link)
    assert (full.number, full.action) == (3, Action.FULL)
    # Read before the one above was taken: its heads would go onto another trunk.
    offer(4, "delivered")
    link._look()
    link.took(full)
    assert link.staged() is None
    again = staged(link)
    assert (again.number, again.action) == (4, Action.FULL)
    link.close()


def test_a_version_that_cannot_serve_is_reported_once(pair, folder, versions, caplog):
    name = versions.write(small_drafter(vocab=VOCAB), {"parent": None})
    versions.use(name)
    (versions.out / name / WEIGHTS).write_bytes(b"half")
    link = link_of(pair, folder)
    (line,) = [each for each in caplog.messages if "current version" in each]
    assert "do not match their checksum" in line and line.count(". ") == 0 and line.endswith(".")
    assert staged(link) is None and link.counts["versions_refused_checksum"] == 1
    link.close()


@pytest.mark.parametrize("place, name", [(versions_module, "_digest"), (versions_module, "opened")])
def test_a_version_pruned_while_it_is_read_gives_way_to_the_newest(
    pair, folder, versions, monkeypatch, place, name
):
    link = link_of(pair, folder)
    real = getattr(place, name)

    def late(*args, **more):
        monkeypatch.setattr(place, name, real)
        versions.use(versions.write(small_drafter(2, vocab=VOCAB), {"parent": None}))
        versions.prune(1)
        return real(*args, **more)

    first = versions.write(small_drafter(1, vocab=VOCAB), {"parent": None})
    with link._looking:  # its thread waits
        versions.use(first)
        monkeypatch.setattr(place, name, late)
    assert wait(link.current).number == 2 and versions.names() == ["version-00002"]
    assert link.counts["versions_refused_checksum"] == 0
    link.close()


FACTS = {"parent": None, "action": "heads", "rows": 12, "gain": 0.5}


def other_drafter(seed: int = 8):
    return small_drafter(seed, vocab=VOCAB)


def test_a_version_is_a_drafter_with_its_provenance(versions):
    drafter = other_drafter()
    name = versions.write(drafter, FACTS)
    assert name == "version-00001" and versions.current() is None
    versions.use(name)
    assert versions.current() == name
    for each in (versions.out, *versions.out.rglob("*")):
        # Only the owner can look.
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each
    path = versions.out / name
    loaded, read = checkpoint.load(path), versions.read(name)
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert read.keys() == dict(drafter.named_parameters()).keys()
    assert all(torch.equal(read[key], value) for key, value in drafter.named_parameters())
    assert list(versions.read(name, lambda key: key == "lm_head.weight")) == ["lm_head.weight"]
    told = json.loads((path / "provenance.json").read_text())
    assert told["adaptation"].items() >= FACTS.items() and "torch" in told["versions"]
    assert versions.write(drafter, {**FACTS, "parent": name}) == "version-00002"
    assert [each["parent"] for each in versions.listed().values()] == [None, name]


def test_nothing_is_made_for_a_look(pair, tmp_path):
    versions = VersionFolder(tmp_path / "none", pair.drafter, pair.target)
    assert versions.current() is None and versions.listed() == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("place, name", [(provenance, "write"), (Path, "rename"), (Path, "chmod")])
def test_a_writer_that_is_killed_leaves_no_version_that_is_not_whole(
    versions, monkeypatch, place, name
):
    versions.use(versions.write(other_drafter(), FACTS))

    class Killed(BaseException): ...

    def kill(*_) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, name, kill)
        versions.write(other_drafter(), FACTS)
    assert versions.names() == ["version-00001"] == [versions.current()]
    versions.unlock()
    versions.lock()
    assert not list(versions.out.glob(".version-*"))
    assert versions.write(other_drafter(), FACTS) == "version-00002"


def flipped(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def garbage(folder: Path) -> None:
    (folder / "provenance.json").write_text('{"adaptation": {"fingerprints": 3}}')


@pytest.mark.parametrize(
    "harm, message",
    [
        (flipped, "do not match their checksum"),
        (lambda made: (made / "model.safetensors").unlink(), "do not match their checksum"),
        (lambda made: (made / "provenance.json").unlink(), "is incomplete"),
        (garbage, "is incomplete"),
        (shutil.rmtree, "no version version-00002"),
    ],
)
def test_what_is_not_whole_is_not_used(versions, harm, message):
    versions.write(other_drafter(), FACTS)
    name = versions.write(other_drafter(9), FACTS)
    versions.use(name)
    harm(versions.out / name)
    assert versions.current() == name
    with pytest.raises(TrainError, match=message) as error:
        versions.use(name)
    assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 3}', '{"version": "../drafter"}'])
def test_a_current_file_that_says_nothing_is_refused(versions, content):
    (versions.out / "current.json").write_text(content)
    with pytest.raises(TrainError, match=r"cannot be read|no version"):
        versions.read(versions.current())


@pytest.mark.parametrize("what", ["drafter", "target"])
def test_a_version_of_others_is_not_used(pair, versions, what, tmp_path):
    versions.use(versions.write(other_drafter(), FACTS))
    other = Pair.make(tmp_path / "other", seed=4)
    if what == "target":
        config = other.target / "config.json"
        config.write_text(config.read_text().replace("8", "9"))
    given = {"drafter": pair.drafter, "target": pair.target, what: getattr(other, what)}
    found = VersionFolder(versions.out, **given)
    with pytest.raises(TrainError, match=f"made for another {what}"):
        found.read(found.current())


def test_weights_that_are_not_finite_are_not_used(versions):
    drafter = other_drafter()
    drafter.norm.weight.data[2] = float("nan")
    name = versions.write(drafter, FACTS)
    with pytest.raises(TrainError, match="not finite"):
        versions.use(name)
    assert versions.current() is None


def test_a_writer_that_is_dying_is_waited_for(tmp_path):
    """A killed process keeps its files until its last thread is gone."""
    held = lock_folder(tmp_path)
    threading.Timer(0.2, os.close, (held,)).start()
    os.close(lock_folder(tmp_path))


def test_old_versions_go_but_never_the_current_one(versions):
    drafter = other_drafter()
    names = [versions.write(drafter, FACTS) for _ in range(KEPT + 3)]
    versions.use(names[0])
    versions.prune()
    assert list(versions.listed()) == [names[0], *names[3:]]
    assert not list(versions.out.glob(".version-*"))


def test_wrong_folders(pair, tmp_path):
    for given in ((tmp_path / "none", pair.target), (pair.drafter, tmp_path / "none")):
        with pytest.raises(TrainError, match="cannot be read"):
            VersionFolder(tmp_path / "out", *given)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainError, match="give one of your own"):
        VersionFolder(tmp_path / "file" / "out", pair.drafter, pair.target).lock()
