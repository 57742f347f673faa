"""The table of classes names every method of the contract, and the page shows it."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import slipstream.v1
from libs.common.rpc.access_table import (
    HTTP_ADMIN_CLASSES,
    HTTP_CLASSES,
    METHOD_CLASSES,
    RPC_CLASSES,
)
from slipstream.keda import externalscaler_pb2
from slipstream.rpc.caller_class import CallerClass

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def rpcs(kind: CallerClass) -> str:
    """The methods of a class by service; of a service of this class alone the name."""
    cells = []
    for service, methods in RPC_CLASSES.items():
        name, named = service.rpartition(".")[2], [f"`{m}`" for m, c in methods.items() if c is kind]
        if len(named) == len(methods):
            cells.append(f"`{name}`")
        elif named:
            cells.append(f"`{name}` ({', '.join(named)})")
    return ", ".join(cells)


def routes(table: Mapping[str, CallerClass], kind: CallerClass) -> str:
    """The routes of a class on one port; of the class with most routes "all others"."""
    if kind is Counter(table.values()).most_common(1)[0][0]:
        return "all others"
    return ", ".join(f"`{route}`" for route, c in table.items() if c is kind)


def markdown_table() -> str:
    """The table as `docs/security.md` shows it."""
    lines = ["| Class | gRPC | `--http` of a router | `--admin-http` |", "| --- | --- | --- | --- |"]
    for kind in CallerClass:
        cells = (kind.value, rpcs(kind), routes(HTTP_CLASSES, kind), routes(HTTP_ADMIN_CLASSES, kind))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def contract() -> dict[str, list[str]]:
    """The methods of every service that a process registers, by the descriptors."""
    names = [module.name for module in pkgutil.iter_modules(slipstream.v1.__path__)]
    modules = [importlib.import_module(f"slipstream.v1.{name}") for name in names if name.endswith("_pb2")]
    modules.append(externalscaler_pb2)
    services = [
        service
        for module in (*modules, health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return {service.full_name: [method.name for method in service.methods] for service in services}


def test_every_method_of_the_contract_has_a_class() -> None:
    known = {service: list(methods) for service, methods in RPC_CLASSES.items()}
    assert {service: sorted(methods) for service, methods in known.items()} == {
        service: sorted(methods) for service, methods in contract().items()
    }
    assert len(METHOD_CLASSES) == sum(map(len, known.values()))


def test_the_page_shows_the_table() -> None:
    assert markdown_table() in PAGE.read_text(encoding="utf-8")
