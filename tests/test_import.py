"""The package needs nothing but its dependencies: torchvision and timm may be missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = {"torchvision", "timm", "matplotlib", "sklearn", "scipy", "PIL", "pandas", "onnx"}
OPTIONAL |= {"lightning", "transformers", "accelerate"}
STUBS = {"missing": "raise ModuleNotFoundError({name!r})", "broken": "raise RuntimeError('{name} is broken')"}
TRAIN = """
import torch, suptickets as st
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
network = st.sparsify(model, st.RigL(0.8, interval=2), optimizer)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 1, 6, 6)).square().mean().backward()
    optimizer.step()
network.check()
print(network.nonzero, st.flops(model, torch.randn(1, 1, 6, 6)).dense)
"""
LIST = "import sys, torch; before = set(sys.modules); import suptickets; print(*(set(sys.modules) - before))"


def python(code: str, *folders: Path) -> str:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", STUBS)
def test_it_imports_and_trains_where_torchvision_and_timm_are(kind: str, tmp_path: Path) -> None:
    for name in ("torchvision", "timm"):
        (tmp_path / f"{name}.py").write_text(STUBS[kind].format(name=name))
    for name in ("torchvision", "timm"):
        assert "stub" in python(f"try: import {name}\nexcept Exception: print('stub')", tmp_path)
    assert python(TRAIN, tmp_path).split() == ["46", str(2 * (16 * 36 + 192))]


def test_importing_it_imports_nothing_optional() -> None:
    """Beyond what torch imports by itself."""
    imported = {name.partition(".")[0] for name in python(LIST).split()}
    assert "suptickets" in imported
    assert not imported & OPTIONAL
