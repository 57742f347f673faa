"""Shorter ways to the same state of Triton's interpreter, which takes a third of its time to prepare calls.

A launch replaces the builtins of triton.language. The interpreter looks for them among all members at each
launch. It does so again at each call of a device function, where all are replaced already. It also makes a
table of all types for each array, and each value of a block unwraps and checks its shape again. Each integer
sum is computed again in 64 bits for an assertion that only a debug build has. Each operation derives the type
of its result from the types of both operands, and fills a block with its constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

patch_every_member = interpreter._patch_lang
table_of_dtypes = interpreter._get_np_dtype
_scan_members = interpreter._patch_builtin
checked_block_type, checked_tensor = tl.block_type.__init__, tl.tensor.__init__
unwrap_any = tl.core._unwrap_if_constexpr
broadcast_any = TritonSemantic.broadcast_impl_value
convert_operands = TritonSemantic.binary_op_type_checking_impl
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
# The same by the identity of a shape as a type has it, which `_SHAPES` keeps.
_SHAPES_BY_ID: dict[int, tuple[Any, int, str, Any, Any]] = {}
_NO_SHAPE, _ONE_ELEMENT = tl.tuple([]), tl.constexpr(1)
# Constants as operands: by value, its class, the other operand's type and shape, and the operation's checks.
_CONSTANTS: dict[tuple[object, ...], Any] = {}
_MOST_CONSTANTS = 2048


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the builtins of a module or class that are not replaced yet."""
    names = _BUILTIN_NAMES.get(id(package))
    if names is None:
        _scan_members(package, builder, scope)
        return
    for name in names:
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            scope.set_attr(package, name, _with_semantic(getattr(member, "__wrapped__", member)))


def _with_semantic(builtin: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        more["_semantic"] = interpreter.interpreter_semantic
        return builtin(*arguments, **more)

    return call


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
    found = _SHAPES_BY_ID.get(id(shape)) or _SHAPES.get(_plain(shape))
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
    found = _SHAPES_BY_ID.get(id(type.shape)) or _SHAPES.get(_plain(type.shape))
    if found is None:
        plain = _plain(type.shape)
        shape = tl.tuple([tl.constexpr(size) for size in plain])
        found = (type.shape, type.numel, str(type.shape), shape, tl.constexpr(type.numel))
        _SHAPES[plain] = _SHAPES_BY_ID[id(type.shape)] = found
    *_, self.shape, self.numel = found


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Two values of one shape. Blocks that have the same one already stay as they are."""
    types = left.type, right.type
    if types[0].is_block() and types[1].is_block():
        shapes = types[0].shape, types[1].shape
        if shapes[0] is shapes[1] or _plain(shapes[0]) == _plain(shapes[1]):
            return left, right
    both: tuple[Any, Any] = broadcast_any(self, left, right)
    return both


def operands(
    self: Any,
    left: Any,
    right: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Both operands with one type and shape. Values of one type stay, and a constant is filled in once."""
    checks = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    values = [each for each in (left, right) if each.__class__ is tl.tensor]
    if len(values) == 2 and (
        _converts_nothing(left.dtype, right.dtype, div_or_mod)
        or (allow_lhs_ptr and _is_pointer(left.dtype) and _is_integer(right.dtype))
    ):
        return broadcast(self, left, right)
    number = right if values and values[0] is left else left
    if len(values) != 1 or number.__class__ not in (int, float):
        found: tuple[Any, Any] = convert_operands(self, left, right, *checks)
        return found
    (value,) = values
    key = (number, number.__class__, value.dtype.name, id(value.shape), number is right, *checks)
    constant = _CONSTANTS.get(key)
    if constant is None:
        found = convert_operands(self, left, right, *checks)
        if found[number is left] is value:
            if len(_CONSTANTS) >= _MOST_CONSTANTS:
                _CONSTANTS.clear()
            _CONSTANTS[key] = constant = found[number is right]
            constant.handle.data.flags.writeable = False  # several operations share it
        return found
    return (left, constant) if number is right else (constant, right)


def _converts_nothing(left: tl.dtype, right: tl.dtype, div_or_mod: bool) -> bool:
    """Whether operands of these types keep them. A division of 16-bit numbers takes 32 bits."""
    if left.__class__ is not tl.dtype or right.__class__ is not tl.dtype or left.name != right.name:
        return False
    return not div_or_mod or left.primitive_bitwidth > 16


def _is_pointer(dtype: tl.dtype) -> bool:
    return dtype.__class__ is tl.pointer_type


def _is_integer(dtype: tl.dtype) -> bool:
    return dtype.__class__ is tl.dtype and dtype.is_int()


def unwrap(value: Any) -> Any:
    """What a constant holds, also within lists and tuples. Values and numbers hold nothing."""
    kind = value.__class__
    if kind is tl.constexpr:
        return value.value
    return value if kind is tl.tensor or kind is int else unwrap_any(value)


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
    tl.core._unwrap_if_constexpr = unwrap
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
