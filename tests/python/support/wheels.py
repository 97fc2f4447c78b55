"""Checks of the contents of a wheel and an sdist.

`make wheel` checks its results with this, and `test_wheel.py` those that maturin builds without zig.
"""

import email
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from project_paths import ROOT

MAX_BYTES = 5_000_000
#: Sources of the Rust core, its binding and the Python package.
SOURCES = (
    "rust/core/src",
    "rust/core/Cargo.toml",
    "rust/pyext/src",
    "rust/pyext/Cargo.toml",
    "python/torchrec_embcache",
)


def version() -> str:
    """The version in Cargo.toml."""
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    return str(cargo["workspace"]["package"]["version"])


def sources(*below: str) -> set[str]:
    """The files below these folders that are not build outputs, as paths relative to the project."""
    files = {path for folder in below for path in [ROOT / folder, *(ROOT / folder).rglob("*")] if path.is_file()}
    built = {path for path in files if path.suffix == ".so" or "__pycache__" in path.parts}
    return {str(path.relative_to(ROOT)) for path in files - built}


def faults_of_wheel(wheel: Path) -> list[str]:
    """The faults of a wheel, a sentence each."""
    bad = []
    if wheel.stat().st_size > MAX_BYTES:
        bad.append(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    if not wheel.name.startswith(f"torchrec_embcache-{version()}-cp311-abi3-"):
        bad.append(f"{wheel.name} is not named after version {version()} and the stable ABI of Python 3.11")
    info = f"torchrec_embcache-{version()}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        package = {path.removeprefix("python/") for path in sources("python/torchrec_embcache")}
        bad += [f"{name} is missing" for name in sorted(package - names)]
        wanted = {
            "torchrec_embcache/_native.abi3.so",
            f"{info}/licenses/LICENSE",
            f"{info}/entry_points.txt",
        }
        bad += [f"{name} is missing" for name in sorted(wanted - names)]
        others = {name for name in names - package - wanted if not name.startswith(f"{info}/")}
        bad += [f"{name} does not belong in a wheel" for name in sorted(others)]
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    if metadata["Version"] != version():
        bad.append(f"METADATA has version {metadata['Version']} and Cargo.toml {version()}")
    return bad


def places_of_the_machine() -> list[bytes]:
    """Paths of this machine that must not be in a build."""
    cargo = os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo")
    return [str(ROOT).encode(), cargo.encode(), os.path.expanduser("~/.rustup").encode()]


def paths_in_wheel(wheel: Path, places: list[bytes]) -> list[str]:
    """The files of a wheel that contain one of these paths."""
    with zipfile.ZipFile(wheel) as archive:
        return [
            f"{name} names {place.decode()}"
            for name in archive.namelist()
            for data in [archive.read(name)]
            for place in places
            if place in data
        ]


def faults_of_sdist(sdist: Path) -> list[str]:
    """The missing and the unexpected files of an sdist, a sentence each."""
    top = f"torchrec_embcache-{version()}/"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()}
    wanted = sources(*SOURCES) | {"Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    bad = [f"{name} is missing in {sdist.name}" for name in sorted(wanted - names)]
    return bad + [f"{name} does not belong in {sdist.name}" for name in sorted(names - wanted)]


def locked(project: Path) -> set[tuple[str, str, str]]:
    """The crates of a lock file: name, version, and checksum."""
    lock = tomllib.loads((project / "Cargo.lock").read_text())
    return {(crate["name"], crate["version"], crate.get("checksum", "")) for crate in lock["package"]}


def cargo_reads(project: Path) -> None:
    """Asserts that Cargo finds every crate of an unpacked sdist, in the versions of the project's lock file.

    Raises `CalledProcessError` if it does not find one. (Cargo removes crates of tests and benches from the lock file, so
    `--locked` would fail.)
    """
    manifest = project / "rust" / "pyext" / "Cargo.toml"
    command = ["cargo", "metadata", "--quiet", "--offline", "--format-version=1", "--manifest-path", str(manifest)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    assert locked(project) < locked(ROOT), locked(project) - locked(ROOT)


def main(folder: Path) -> int:
    """Checks the one wheel and the one sdist in `folder`. Returns the exit status."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    bad = faults_of_wheel(wheel) + paths_in_wheel(wheel, places_of_the_machine()) + faults_of_sdist(sdist)
    for fault in bad:
        print(fault, file=sys.stderr)
    print(f"{wheel}: {wheel.stat().st_size:,} bytes\n{sdist}: {sdist.stat().st_size:,} bytes")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
