"""Reads a GGUF file's header: metadata, and where each tensor's bytes lie. Needs neither torch nor the tensors.

Written here since the `gguf` package's reader takes 1.6 s for a vocabulary of 49,152 tokens, this one 0.1 s, and since
a damaged file must end in one clear error. Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from actors.messages.errors import ConfigurationError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFTensor(msgspec.Struct, frozen=True):
    """`shape` has the rows first, as in torch; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFHeader(msgspec.Struct, frozen=True):
    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Raises ConfigurationError for a file that is no GGUF, is cut short, or whose header makes no sense."""
    try:
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except OSError as error:
        raise ConfigurationError(f"the weights {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, KeyError, OverflowError, MemoryError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"the weights {path} are damaged or cut short ({what}). Fetch or copy the file again")


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise ConfigurationError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ConfigurationError(f"{self._path} is GGUF version {version}; kvyard reads versions 2 and 3")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        raw = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        tensors = {t.name: msgspec.structs.replace(t, offset=start + t.offset) for t in raw}
        end = max((t.offset + t.num_bytes for t in tensors.values()), default=start)
        if end > len(self._data):
            raise _damaged(self._path, f"{len(self._data)} bytes, but its tensors end at {end}")
        return GGUFHeader(str(self._path), metadata, tensors)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("a string reaches beyond the end")
        text = self._data[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, length = self._scalar("<I"), self._scalar("<Q")
        if item == _STRING:
            return [self._string() for _ in range(length)]
        if item == _ARRAY:
            raise ValueError("an array of arrays")
        values = np.frombuffer(self._data, np.dtype(_SCALARS[item]), length, self._at).tolist()
        self._at += struct.calcsize(_SCALARS[item]) * length
        return values

    def _tensor(self) -> GGUFTensor:
        name = self._string()
        dimensions = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        quantization = gguf.GGMLQuantizationType(self._scalar("<I"))
        values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[quantization]
        if dimensions and dimensions[0] % values_per_block:
            raise ValueError(
                f"{name}: rows of {dimensions[0]} values in {quantization.name}, whose blocks have {values_per_block}"
            )
        size = 1
        for dimension in dimensions:
            size *= dimension
        return GGUFTensor(
            name,
            tuple(reversed(dimensions)),
            quantization,
            self._scalar("<Q"),
            size // values_per_block * bytes_per_block,
        )
