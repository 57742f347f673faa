"""The table of classes names every method of the contract, and the page shows it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import slipstream.v1
from libs.common.rpc.access_table import (
    HTTP_CLASSES,
    HTTP_ROUTER_CLASSES,
    HTTP_SERVICE_CLASSES,
    METHOD_CLASSES,
    RPC_CLASSES,
)
from slipstream.keda import externalscaler_pb2
from slipstream.rpc.caller_class import CallerClass

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def markdown_tables() -> str:
    """The tables as `docs/security.md` shows them."""
    lines = ["| gRPC service | " + " | ".join(CallerClass) + " |", "| --- |" + " --- |" * len(CallerClass)]
    for service, methods in RPC_CLASSES.items():
        cells = [
            ", ".join(f"`{method}`" for method, kind in methods.items() if kind is column)
            for column in CallerClass
        ]
        lines.append(f"| `{service.rpartition('.')[2]}` | " + " | ".join(cells) + " |")
    lines += ["", "| HTTP | class | routes |", "| --- | --- | --- |"]
    ports = {
        "router, public": HTTP_CLASSES,
        "every service, admin": HTTP_SERVICE_CLASSES,
        "router, admin": HTTP_ROUTER_CLASSES,
    }
    for port, routes in ports.items():
        for column in CallerClass:
            named = ", ".join(f"`{route}`" for route, kind in routes.items() if kind is column)
            lines += [f"| {port} | {column} | {named} |"] if named else []
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
    assert markdown_tables() in PAGE.read_text(encoding="utf-8")
