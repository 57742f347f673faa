"""python -m bench.gpu.section_process NAME: the cases of one section, in a process that can be killed.

Standard output has one JSON line a case: {"figure": {..}} or {"left_out": {"case": .., "reason": ..}}.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.case import Bench, Ceilings, NotMeasured, ReportSection
from bench.gpu.sections import CEILINGS, SECTIONS

TIME_IS_OVER = "the time of its section was over"


def measure_section(section: ReportSection, bench: Bench, limit_s: float) -> Iterator[dict[str, Any]]:
    """Figures and what is left out, by the names of the module's docstring. Cases do not end each other."""
    began_s = time.monotonic()
    for case in section.cases(bench):
        name = f"{case.name}, {case.setting}"
        if time.monotonic() - began_s >= limit_s:
            yield {"left_out": {"case": name, "reason": TIME_IS_OVER}}
            continue
        try:
            figure = case.measure()
        except NotMeasured as missing:
            yield {"left_out": {"case": name, "reason": str(missing)}}
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            yield {"left_out": {"case": name, "reason": reason}}
        else:
            yield {"figure": {"section": section.name, "name": case.name, "setting": case.setting} | figure}
        if bench.device.type == "cuda":  # its memory is free for the next case
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sections = {section.name: section for section in (CEILINGS, *SECTIONS)}
    parser.add_argument("section", choices=sections)
    parser.add_argument("--device", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--ceilings", type=float, nargs=2, default=(1.0, 1.0))
    parser.add_argument("--miniature", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(
        torch.device(arguments.device), arguments.repeats, Ceilings(*arguments.ceilings), arguments.miniature
    )
    for row in measure_section(sections[arguments.section], bench, arguments.limit_s):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
