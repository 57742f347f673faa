"""The figures of a load report that others may count with. Pure.

A report is another process's word. Placement and autoscaling add, divide and compare its figures. One NaN
would make every comparison false, and one infinite or negative figure would decide for the whole tier.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from slipstream.v1 import worker_pb2

# No process runs or queues more requests, and none has more tokens or blocks. Sums of a fleet fit 64 bits.
MAX_REQUESTS = 1 << 20
MAX_AMOUNT = 1 << 40
# A rate or a time below this counts as none, so that its inverse stays finite.
LEAST_FIGURE = 1e-6
_MAX_FIGURE = 1e12
_MAX_SHARE = 1.0
_NO_FIGURES = ("sequence", "draining")


def _bounds() -> dict[str, float]:
    """The most that each field may have; integers as integers."""
    most: dict[str, float] = {}
    for field in worker_pb2.LoadReport.DESCRIPTOR.fields:
        if field.name in _NO_FIGURES:
            continue
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            most[field.name] = _MAX_SHARE if field.name.endswith("_share") else _MAX_FIGURE
        else:
            most[field.name] = MAX_REQUESTS if field.type == FieldDescriptor.TYPE_UINT32 else MAX_AMOUNT
    return most


_MOST = tuple(_bounds().items())


def keep_plausible(report: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
    """Bound each figure of the report in place, with 0 for one that is no number; returns the report."""
    for name, most in _MOST:
        value = getattr(report, name)
        if not value or LEAST_FIGURE <= value <= most:
            continue
        setattr(report, name, most if value > most else 0)  # 0 for NaN, too
    return report
