"""Shorter ways to the same state of Triton's interpreter, which takes a third of its time to prepare calls.

A launch replaces the builtins of triton.language. The interpreter looks for them among all members at each
launch. It does so again at each call of a device function, where all are replaced already. It also makes a
table of all types for each array, and each value of a block unwraps and checks its shape again. Each integer
sum is computed again in 64 bits for an assertion that only a debug build has.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

patch_every_member = interpreter._patch_lang
table_of_dtypes = interpreter._get_np_dtype
_scan_members = interpreter._patch_builtin
checked_block_type, checked_tensor = tl.block_type.__init__, tl.tensor.__init__
broadcast_any = TritonSemantic.broadcast_impl_value
assert_no_overflow = TritonSemantic.binary_op_sanitize_overflow_impl


def _builtin_names(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


# Before any launch, so that no builtin is replaced yet.
_BUILTIN_NAMES = {
    id(package): _builtin_names(package)
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}
_DTYPES: dict[str, np.dtype[Any]] = {}
# By shape: as a type has it, its elements, its text, and shape and elements as a tensor has them.
_SHAPES: dict[tuple[int, ...], tuple[Any, int, str, Any, Any]] = {}
_NO_SHAPE, _ONE_ELEMENT = tl.tuple([]), tl.constexpr(1)


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the builtins of a module or class that are not replaced yet."""
    names = _BUILTIN_NAMES.get(id(package))
    if names is None:
        _scan_members(package, builder, scope)
        return
    for name in names:
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def patch_lang(fn: Any) -> Any:
    """The scope of a launch. The call of a device function within a launch replaces nothing again."""
    modules = [module for module in (tl, tl.core) if any(each is module for each in fn.__globals__.values())]
    if modules and not any(
        tl.core.is_builtin(member) for module in modules for member in (module.load, module.tensor.__add__)
    ):
        return interpreter._LangPatchScope()
    return patch_every_member(fn)


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """numpy's type for the elements of a Triton type."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    found = _DTYPES.get(element.name)
    if found is None:
        found = _DTYPES[element.name] = table_of_dtypes(element)
    return found


def init_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    """The type of a block. A shape that was checked once is not checked again."""
    found = _SHAPES.get(_plain(shape))
    if found is None:
        checked_block_type(self, element_ty, shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, text, _, _ = found
    self.name = f"<{text}, {element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """A value of the type. Values of one shape share what describes it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if not type.is_block():
        self.shape, self.numel = _NO_SHAPE, _ONE_ELEMENT
        return
    plain = _plain(type.shape)
    found = _SHAPES.get(plain)
    if found is None:
        shape = tl.tuple([tl.constexpr(size) for size in plain])
        found = _SHAPES[plain] = (type.shape, type.numel, str(type.shape), shape, tl.constexpr(type.numel))
    *_, self.shape, self.numel = found


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Two values of one shape. Blocks that have the same one already stay as they are."""
    types = left.type, right.type
    if all(type.is_block() for type in types) and _plain(types[0].shape) == _plain(types[1].shape):
        return left, right
    both: tuple[Any, Any] = broadcast_any(self, left, right)
    return both


def check_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    """Assert that an integer result fits its type, where assertions have an effect."""
    if self.builder.options.debug:
        assert_no_overflow(self, left, right, operation)


def _plain(shape: Any) -> tuple[int, ...]:
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    return tuple([size.value if isinstance(size, tl.constexpr) else size for size in sizes])


def install() -> None:
    """Take the shorter ways in this process."""
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
