"""What kernels are compiled for: whatever they do not want to be is named as it is called."""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "triton_kernels"


def unspecialized(path: Path):
    """(function, its parameters, what its decorator names) of a file."""
    for function in ast.walk(ast.parse(path.read_text())):
        for decorator in getattr(function, "decorator_list", ()):
            for option in getattr(decorator, "keywords", ()):
                if option.arg == "do_not_specialize":
                    parameters = {parameter.arg for parameter in function.args.args}
                    yield function.name, parameters, ast.literal_eval(option.value)


def test_what_is_not_specialized_is_a_parameter():
    """Triton says nothing of a name that it does not find, and compiles in the midst of serving."""
    found = [case for path in sorted(KERNELS.rglob("*.py")) for case in unspecialized(path)]
    assert len(found) > 20
    for name, parameters, named in found:
        assert set(named) <= parameters, f"{name}: {set(named) - parameters} are no parameters"
