"""The wheel and the sdist: what they have, and that the package works where its sources are not.

The wheel here comes from what `make setup` has built already. `make wheel` builds the one for other machines, by zig, and holds it
against the same rules (`wheels.py`) and for paths of the machine.
"""

import os
import random
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import wheels
from wheels import ROOT, version

pytestmark = pytest.mark.slow  # builds and installs packages

BIN = Path(sys.executable).parent

TRAINED_FROM_A_WHEEL = """
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torchrec_embcache
from torchrec_embcache import EmbCacheEmbeddingBag, Saver, TierBudgets, optimizers

assert Path(torchrec_embcache.__file__).is_relative_to(sys.prefix), torchrec_embcache.__file__
assert version("torchrec-embcache") == torchrec_embcache.__version__
tiers = TierBudgets(device_bytes="8KiB", host_bytes="64KiB", ssd_bytes="8MiB", ssd_dir="rows")
bag = EmbCacheEmbeddingBag(name="item", embedding_dim=16, tiers=tiers, optimizer=optimizers.RowWiseAdagrad(lr=0.1))
for step in range(40):
    bag(torch.arange(50 * step, 50 * step + 50)[:, None]).sum().backward()
stats = bag.stats()
assert len(bag) == 2000
assert min(stats.device.rows, stats.host.rows, stats.ssd.rows) > 0, stats
Saver(0).save(torch.nn.Sequential(bag), "ckpt")
bag.close()
print(torchrec_embcache.__version__)
"""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist. The environment is that of the Makefile, so that cargo finds everything built."""
    folder = tmp_path_factory.mktemp("dist")
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYO3_PYTHON": sys.executable, "VIRTUAL_ENV": sys.prefix}
    run(BIN / "python", "-m", "maturin", "build", "--release", "--locked", "--out", folder, **environment)
    run(BIN / "python", "-m", "maturin", "sdist", "--out", folder, **environment)
    return folder


@pytest.fixture
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.mark.slow
def test_a_wheel_and_an_sdist_have_what_they_must_and_nothing_else(wheel: Path, sdist: Path) -> None:
    assert wheels.faults_of_wheel(wheel) == []
    assert wheels.faults_of_sdist(sdist) == []


def test_pypi_takes_both_and_the_wheel_runs_on_any_linux_of_its_tag(wheel: Path, sdist: Path) -> None:
    assert run(BIN / "twine", "check", "--strict", wheel, sdist, NO_COLOR="1").count("PASSED") == 2
    told = " ".join(run(BIN / "auditwheel", "show", wheel).split())
    tag = wheel.stem.rpartition("-")[2]
    assert f'is consistent with the following platform tag: "{tag}"' in told
    assert tag.startswith("manylinux_2_")


@pytest.mark.slow
def test_a_wheel_trains_all_three_tiers_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    # To install torch again would take minutes. A .pth file adds the folder with it. The .pth files in that folder are not read,
    # so the sources of the project, which one of them adds, are not there.
    clean = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", clean)
    here = clean / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (here / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = clean / "bin" / "python"
    run(BIN / "python", "-m", "uv", "pip", "install", "--offline", "--no-deps", "--python", python, wheel, cwd=tmp_path)
    (tmp_path / "rows").mkdir(mode=0o750)
    assert run(python, "-c", TRAINED_FROM_A_WHEEL, cwd=tmp_path).strip() == version()
    assert run(clean / "bin" / "embcache", "--version", cwd=tmp_path).strip() == f"embcache {version()}"
    assert "item" in run(clean / "bin" / "embcache", "inspect", "ckpt", cwd=tmp_path)


def test_cargo_finds_all_crates_of_an_unpacked_sdist(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    project = tmp_path / f"torchrec_embcache-{version()}"
    wheels.cargo_reads(project)
    (project / "rust" / "core" / "Cargo.toml").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        wheels.cargo_reads(project)


def changed(wheel: Path, folder: Path, *, without: str = "", **more: bytes) -> Path:
    """A copy of a wheel without a file, or with more of them: `__` stands for a slash."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as made:
        for name in given.namelist():
            if name != without:
                made.writestr(name, given.read(name))
        for name, data in more.items():
            made.writestr(name.replace("__", "/"), data)
    return copy


@pytest.mark.slow
def test_what_is_missing_or_too_much_in_a_wheel_is_named(wheel: Path, tmp_path: Path) -> None:
    lacking = changed(wheel, tmp_path, without="torchrec_embcache/py.typed", tests__test_x=b"")
    assert wheels.faults_of_wheel(lacking) == [
        "torchrec_embcache/py.typed is missing",
        "tests/test_x does not belong in a wheel",
    ]
    large = changed(wheel, tmp_path, torchrec_embcache__more=random.randbytes(wheels.MAX_BYTES))
    assert "bytes, more than 5000000" in wheels.faults_of_wheel(large)[0]


def test_a_path_of_the_machine_in_a_wheel_is_named(wheel: Path, tmp_path: Path) -> None:
    told = changed(wheel, tmp_path, notes=b"built in " + bytes(ROOT))
    assert wheels.paths_in_wheel(told, [bytes(ROOT)]) == [f"notes names {ROOT}"]
    assert wheels.paths_in_wheel(wheel, [bytes(tmp_path)]) == []
