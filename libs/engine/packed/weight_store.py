"""Where a loader's weights are: in the memory of the process, in a new file, or in a file that was mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from libs.engine.kernels.panels import PanelPacker, Panels, TensorMemory
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix
from libs.engine.packed.file_memory import FileMemory
from libs.engine.packed.packed_file import (
    OpenPackedFile,
    PackedIndex,
    PackedMatrix,
    PackedTensor,
    append_index,
    checksums,
    protect,
    tensor_dtype,
)

# A matrix, or one in the form of the kernels, which is opaque to a loader.
PackableMatrix = Any
_KEYS, _VALUES = ".keys", ".values"
_CPU = torch.device("cpu")


class WeightStore(Protocol):
    """`make` gives what the checkpoint has, and runs only where the store lacks it."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that a `make` fills until the checkpoint is finished."""
        ...

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor: ...

    def matrix(self, name: str, make: Callable[[], Matrix]) -> PackableMatrix: ...

    def heads(
        self, name: str, make: Callable[[], DenseMatrix | StoredMatrix], nope: int, v: int
    ) -> PackableMatrix:
        """The two matrices of each head of kv_b_proj."""
        ...

    def finish(self) -> None:
        """All weights have their values."""
        ...


class PrivateWeights:
    """Weights in the memory of this process, or on its device."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def matrix(self, name: str, make: Callable[[], Matrix]) -> PackableMatrix:
        return make()

    def heads(
        self, name: str, make: Callable[[], DenseMatrix | StoredMatrix], nope: int, v: int
    ) -> PackableMatrix:
        return make()

    def finish(self) -> None:
        pass


class MappedWeights:
    """Weights of a packed file. The checkpoint's values are not read."""

    def __init__(self, file: OpenPackedFile) -> None:
        self._file = file

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("a mapped weight is not made")

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._file.tensor(self._file.index.tensors[name])

    def matrix(self, name: str, make: Callable[[], Matrix]) -> Panels:
        found = self._file.index.matrices[name]
        scale = None if found.scale is None else self._file.tensor(found.scale)
        return Panels(found.rows, found.cols, self._file.tensor(found.data), scale, found.group)

    def heads(
        self, name: str, make: Callable[[], DenseMatrix | StoredMatrix], nope: int, v: int
    ) -> tuple[Panels, Panels]:
        keys, values = (self.matrix(f"{name}{part}", lambda: make()) for part in (_KEYS, _VALUES))
        return keys, values

    def finish(self) -> None:
        pass


class NewPackedFile:
    """Weights that are packed into a new file, which gets its name when all are there.

    This process computes with the pages of the file, too. Where the disk fills up, further weights go to the
    memory of the process, and no file is left.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        make_packer: Callable[[TensorMemory], PanelPacker],
        expected_bytes: int,
    ) -> None:
        """Raises OSError when the file cannot be made, or has no room."""
        self._path, self._key = path, key
        self._part = path.with_name(f"{path.name}.part")
        self._part.unlink(missing_ok=True)  # of a process that was killed
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._tensors: dict[str, torch.Tensor] = {}
        self._matrices: dict[str, Panels] = {}
        self._is_full = False
        try:
            self._memory = FileMemory(self._descriptor, expected_bytes)
        except BaseException:
            self.close()
            raise
        self._packer = make_packer(self)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the packer and for `empty`."""
        if not self._is_full:
            try:
                return self._memory.allocate(shape, dtype)
            except OSError:
                self._is_full = True
        return torch.zeros(shape, dtype=dtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self.allocate(shape, dtype)

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = self._tensors[name] = make()
        return found

    def matrix(self, name: str, make: Callable[[], Matrix]) -> Panels:
        found = self._matrices[name] = self._packer.pack(make())
        return found

    def heads(
        self, name: str, make: Callable[[], DenseMatrix | StoredMatrix], nope: int, v: int
    ) -> tuple[Panels, Panels]:
        keys, values = self._packer.pack_heads(make(), nope, v)
        self._matrices[f"{name}{_KEYS}"], self._matrices[f"{name}{_VALUES}"] = keys, values
        return keys, values

    def finish(self) -> None:
        """Give the file its name. Raises OSError; the weights are in memory then, too."""
        try:
            tensors = {name: self._put(tensor) for name, tensor in self._tensors.items()}
            matrices = {name: self._matrix(panels) for name, panels in self._matrices.items()}
            if self._is_full:
                raise OSError("the file system is full")
            n_bytes = self._memory.used_bytes
            os.ftruncate(self._descriptor, n_bytes)
            pieces = tuple(_checksums_of(self._descriptor, n_bytes))
            append_index(self._descriptor, PackedIndex(self._key, n_bytes, pieces, tensors, matrices))
            os.rename(self._part, self._path)
        finally:
            self.close()
        self._memory.protect()

    def close(self) -> None:
        """Leave no file without its name. The weights stay."""
        self._part.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _matrix(self, panels: Panels) -> PackedMatrix:
        scale = None if panels.scale is None else self._put(panels.scale)
        return PackedMatrix(panels.rows, panels.cols, self._put(panels.data), scale, panels.group)

    def _put(self, tensor: torch.Tensor) -> PackedTensor:
        """Where a tensor is in the file; small ones are copied there."""
        offset = self._memory.offset(tensor)
        if offset is None:
            copy = self.allocate(tuple(tensor.shape), tensor.dtype)
            copy.copy_(tensor)
            offset = self._memory.offset(copy) or 0
        return PackedTensor(tensor_dtype(tensor.dtype), tuple(tensor.shape), offset)


def _checksums_of(descriptor: int, n_bytes: int) -> list[str]:
    whole = mmap.mmap(descriptor, n_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    address = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
    protect(address, n_bytes)
    return checksums(address, n_bytes)
