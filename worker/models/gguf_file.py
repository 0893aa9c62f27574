"""Reading a GGUF file: metadata as plain Python values, tensors as views of the memory-mapped file.

The `gguf` package's reader makes one numpy view per vocabulary entry, which takes seconds; this one reads each array in
one pass. Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. Never imports torch.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from common.errors import ModelError

_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` in the order of numpy and torch (rows first), `raw` its bytes (uint8, 1-D view)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    raw: np.ndarray


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file's metadata and tensors. Arrays of numbers are numpy arrays, arrays of strings are lists."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The value of general.architecture."""
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value under `{architecture}.{key}`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file. Raises ModelError when it is not one, is cut off, or is of an unknown version."""
    try:
        with open(path, "rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        file = _read(data)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path} is not a complete GGUF file: {error}") from error
    if "general.architecture" not in file.metadata:
        raise ModelError(f"{path} does not name its architecture (general.architecture)")
    return file


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self.data, self.offset)[0]
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self._bytes(self.scalar("Q")).decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """Read `count` strings; a loop with local names, because vocabularies have hundreds of thousands."""
        data, offset, end = self.data, self.offset, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            if offset > end:
                raise ValueError("a string goes past the end")
            found.append(data[start:offset].decode("utf-8"))
        self.offset = offset
        return found

    def array(self) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"arrays of type {kind} are not known")
        dtype = np.dtype("?" if kind == _BOOL else f"<{_SCALARS[kind]}")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype=dtype)

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"values of type {kind} are not known")
        return self.scalar(_SCALARS[kind])

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.offset:
            raise ValueError("a value goes past the end")
        start, self.offset = self.offset, self.offset + count
        return self.data[start : self.offset]


def _read(data: mmap.mmap) -> GGUFFile:
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.offset = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3 (or the file is big-endian)")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value()
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment <= 0:
        raise ValueError("the alignment is not positive")
    start = -(-cursor.offset // alignment) * alignment
    raw = np.frombuffer(data, dtype=np.uint8)
    return GGUFFile(metadata, {info[0]: _tensor(raw, start, *info) for info in infos})


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = cursor.string(), cursor.scalar("I")
    if dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dims))
    return name, tuple(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(raw: np.ndarray, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    tensor_type = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    count = 1
    for size in shape:
        count *= size
    if shape and shape[-1] % block:
        raise ValueError(f"the rows of tensor {name} are not whole blocks of {tensor_type.name}")
    size_bytes = count // block * block_bytes
    first = start + offset
    if first + size_bytes > len(raw):
        raise ValueError(f"tensor {name} goes past the end")
    return GGUFTensor(name, shape, tensor_type, raw[first : first + size_bytes])
