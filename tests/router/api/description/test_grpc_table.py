"""The page of clients maps each HTTP operation of a tenant to a method of the contract, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

from libs.common.rpc.access_table import HTTP_CLASSES, RPC_CLASSES
from services.router.api.description.operations import OPERATIONS
from slipstream.rpc.caller_class import CallerClass
from tests.common.rpc.test_access_table import contract

_PAGE = Path(__file__).parents[4] / "docs" / "api.md"
_ROW = re.compile(r"^\| (`(?:(?:GET|POST|DELETE) )?/.+`) \| (.+) \|$", re.MULTILINE)
_REST = "/client/v4/..."
_METHOD = re.compile(r"`(\w+Service)\.(\w+)`")


def rows() -> dict[str, str]:
    """The cell of gRPC of each operation; a row may name several, or the beginning of all others."""
    _, _, section = _PAGE.read_text(encoding="utf-8").partition("## The same over gRPC\n")
    cells = _ROW.findall(section.partition("\n## ")[0])
    found = [(operation, cell) for names, cell in cells for operation in re.findall("`(.+?)`", names)]
    assert len(found) == len(dict(found))
    named = dict(found)
    rest = named.pop(_REST)
    paths = {route for route in HTTP_CLASSES if route.split(" ")[1].startswith(_REST.rstrip("."))}
    assert paths
    return {**named, **dict.fromkeys(paths, rest)}


def test_each_operation_of_a_tenant_has_a_row() -> None:
    operations = {f"{each.method.upper()} {each.path}" for each in OPERATIONS if not each.is_open}
    assert operations == rows().keys()
    assert operations == {route for route, kind in HTTP_CLASSES.items() if kind is CallerClass.TENANT}


def test_each_row_names_methods_of_tenants_or_a_reason() -> None:
    known = contract()
    for operation, cell in rows().items():
        methods = _METHOD.findall(cell)
        assert bool(methods) is not cell.startswith("none: "), operation
        for service, method in methods:
            full_name = f"slipstream.v1.{service}"
            assert method in known[full_name], (operation, method)
            assert RPC_CLASSES[full_name][method] is CallerClass.TENANT


def test_each_method_of_files_batches_and_responses_is_named() -> None:
    """Other services have methods that HTTP has not, such as Abort and FollowJobs."""
    named = {pair for cell in rows().values() for pair in _METHOD.findall(cell)}
    for service in ("BatchService", "ResponseService"):
        methods = {(service, method) for method in contract()[f"slipstream.v1.{service}"]}
        assert methods <= named
