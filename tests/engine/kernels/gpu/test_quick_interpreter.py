"""The shorter ways through Triton's interpreter lead to the state that it makes itself."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)

# isort: split
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.engine.kernels.gpu import quick_interpreter


@triton.jit
def _doubled(value):  # type: ignore[no-untyped-def]
    return value + value


@triton.jit  # type: ignore[untyped-decorator]
def _doubling(source, target, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    tl.store(target + at, _doubled(tl.load(source + at)))


def changes(scope: Any) -> set[tuple[int, str]]:
    found = {(id(obj), name) for obj, name, _ in scope._changes}
    scope.restore()
    return found


def builtins() -> dict[str, object]:
    return {name: getattr(tl, name) for name in dir(tl)} | {
        f"tensor.{name}": getattr(tl.tensor, name) for name in dir(tl.tensor)
    }


def test_a_launch_replaces_what_the_interpreter_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtins()
    quick = changes(interpreter._patch_lang(_doubling.fn))
    assert builtins() == before
    monkeypatch.setattr(interpreter, "_patch_builtin", quick_interpreter._scan_members)
    assert changes(quick_interpreter.patch_every_member(_doubling.fn)) == quick
    assert builtins() == before
    assert len(quick) > 100


def test_a_device_function_finds_all_replaced() -> None:
    launch = interpreter._patch_lang(_doubling.fn)
    try:
        nested = quick_interpreter.patch_every_member(_doubled.fn)
        # The rest is replaced by equal functions.
        assert {(id(obj), name) for obj, name, _ in nested._changes} < changes_of(launch)
        nested.restore()
        assert not interpreter._patch_lang(_doubled.fn)._changes
    finally:
        launch.restore()


def changes_of(scope: Any) -> set[tuple[int, str]]:
    return {(id(obj), name) for obj, name, _ in scope._changes}


def test_programs_compute_and_leave_nothing_replaced() -> None:
    before = builtins()
    source, target = torch.arange(8.0), torch.zeros(8)
    for _ in range(2):
        _doubling[(1,)](source, target, 8)
    assert target.tolist() == (2 * source).tolist()
    assert builtins() == before


@pytest.mark.parametrize("shape", [[1], [16, 32], [tl.constexpr(8), 2], tl.tuple([4, 1, 64])])
def test_types_and_values_describe_their_shape_as_the_checked_ones(shape: Any) -> None:
    checked = object.__new__(tl.block_type)
    quick_interpreter.checked_block_type(checked, tl.float32, shape)
    for _ in range(2):  # the second is known
        quick = tl.block_type(tl.float32, shape)
        assert vars(quick).keys() == vars(checked).keys() and str(quick) == str(checked)
        assert (quick.element_ty, quick.numel) == (checked.element_ty, checked.numel)
        assert quick.shape.values == checked.shape.values
        value, other = tl.tensor("handle", quick), object.__new__(tl.tensor)
        quick_interpreter.checked_tensor(other, "handle", checked)
        assert vars(value).keys() == vars(other).keys() and str(value) == str(other)
        assert value.numel.value == other.numel.value == checked.numel
    for wrong in ([], [3], [1 << 30]):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.float32, wrong)


def test_a_scalar_has_no_shape() -> None:
    value, other = tl.tensor("handle", tl.int32), object.__new__(tl.tensor)
    quick_interpreter.checked_tensor(other, "handle", tl.int32)
    assert vars(value).keys() == vars(other).keys() and str(value) == str(other)
    assert value.numel.value == other.numel.value == 1


SCALARS = [*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.FP_TYPES]


@pytest.mark.parametrize("name", SCALARS)
def test_types_are_those_of_the_interpreters_table(name: str) -> None:
    scalar = tl.dtype(name)
    for dtype in (scalar, tl.block_type(scalar, [2]), tl.pointer_type(scalar)):
        assert quick_interpreter.np_dtype(dtype) == quick_interpreter.table_of_dtypes(dtype)
    pointers = tl.block_type(tl.pointer_type(scalar), [2])
    assert quick_interpreter.np_dtype(pointers) == np.dtype(np.uint64)


@pytest.mark.parametrize(
    ("left", "right"), [([4, 2], [4, 2]), ([4, 1], [1, 2]), ([2], [4, 2]), ([4], None), (None, None)]
)
def test_values_take_one_shape_as_the_interpreter_gives_it(
    left: list[int] | None, right: list[int] | None
) -> None:
    def value(shape: list[int] | None) -> Any:
        data = np.arange(np.prod(shape or [1]), dtype=np.int32).reshape(shape or [1])
        kind = tl.int32 if shape is None else tl.block_type(tl.int32, shape)
        return tl.tensor(interpreter.TensorHandle(data, tl.int32), kind)

    semantic = interpreter.interpreter_semantic
    quick = semantic.broadcast_impl_value(value(left), value(right))
    checked = quick_interpreter.broadcast_any(semantic, value(left), value(right))
    for found, wanted in zip(quick, checked, strict=True):
        assert str(found.type) == str(wanted.type)
        np.testing.assert_array_equal(found.handle.data, wanted.handle.data)


POINTER = tl.pointer_type(tl.float32)
OPERANDS = [
    *[
        (name, shape)
        for name in ("int1", "int32", "int64", "uint8", "fp16", "bf16", "fp32")
        for shape in (None, 4)
    ],
    *[(number, None) for number in (2, 2.0, -1, 1 << 40, True, 0.5, -0.0, float("inf"))],
    ("pointer", None),
    ("pointer", 4),
]


def operand(kind: str | float, n: int | None) -> Any:
    if not isinstance(kind, str):
        return kind
    scalar = POINTER if kind == "pointer" else tl.dtype(kind)
    data = np.arange(n or 1).astype(quick_interpreter.table_of_dtypes(scalar))
    return tl.tensor(interpreter.TensorHandle(data, scalar), tl.block_type(scalar, [n]) if n else scalar)


def outcome(operands: Any, left: Any, right: Any, checks: tuple[bool, ...]) -> object:
    """The types and values of both operands, or the error."""
    try:
        found = operands(interpreter.interpreter_semantic, left, right, *checks)
    except Exception as error:
        return type(error), str(error)
    return [(str(each.type), str(each.shape), repr(each.handle.data)) for each in found]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    "checks", [(), (True, True), (True, False), (False, False, False, True), (False, False, True, True)]
)
def test_operands_take_one_type_as_the_interpreter_gives_it(checks: tuple[bool, ...]) -> None:
    for left, right in itertools.product(OPERANDS, OPERANDS):
        wanted = outcome(quick_interpreter.convert_operands, operand(*left), operand(*right), checks)
        for _ in range(2):  # the second finds the constant
            found = outcome(quick_interpreter.operands, operand(*left), operand(*right), checks)
            assert found == wanted, (left, right)


@pytest.mark.parametrize(
    "value",
    [tl.constexpr(3), tl.constexpr(None), 3, None, [tl.constexpr(1), 2], (tl.constexpr(1), 2), tl.int32],
)
def test_a_constant_is_unwrapped_as_by_the_interpreter(value: Any) -> None:
    found, wanted = quick_interpreter.unwrap(value), quick_interpreter.unwrap_any(value)
    assert type(found) is type(wanted) and found == wanted


def test_an_overflow_is_asserted_in_a_debug_build_only(monkeypatch: pytest.MonkeyPatch) -> None:
    semantic = interpreter.interpreter_semantic
    value = tl.tensor(interpreter.TensorHandle(np.array([1 << 30], np.int32), tl.int32), tl.int32)

    def double() -> None:
        semantic.binary_op_sanitize_overflow_impl(value, value, semantic.add)

    double()
    debug = dataclasses.replace(semantic.builder.options, debug=True)
    monkeypatch.setattr(semantic.builder, "options", debug)
    with pytest.raises(AssertionError, match="int32 overflow detected for operation add"):
        double()
