"""Every command of bench/ starts; in `make soak` each also runs once in its shortest form."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Processes that a benchmark starts: their arguments are its business.
CHILDREN = {
    "bench.engine.peers.child",
    "bench.fakes.smg_worker",
    "bench.fakes.worker",
    "bench.gpu.section_process",
    "bench.kvstore.peer",
    "bench.kvstore.pool_node",
    "bench.worst_requests.healthy_stream",
}
IMAGES = {"bench.images"}  # needs built images: tests/images runs it
# {tmp}: a folder of the test, {trace}: a small trace in Mooncake's format.
SHORTEST = {
    "bench.acceptance": "--dialogues 1 --max-tokens 8 --json",
    "bench.autoscale": "--requests 200 --json",
    "bench.cache.compare": "--load chats --capacity 100 --requests 200 --json",
    "bench.cache.disk": "--trace {trace} --capacity 8 --json",
    "bench.cache.policy": "--trace {trace} --capacity 8 --json",
    "bench.cache.prefix_index": "--sessions 2 --tokens 1000 --turns 2 --json",
    "bench.cache.token_cache": "--messages 20 --rounds 1 --turns 1 --words 5 --json",
    "bench.cancel": "--rounds 1 --only decode --transport socket --json",
    "bench.chaos": "--minutes 0.05 --clients 2 --pause-s 0.5 --soak --soak-minutes 0.2 --json",
    "bench.demo": "--exit --transport socket",
    "bench.draft_chain": "--contexts 1,2 --drafts 2 --rounds 2 --json",
    "bench.draft_rows": "--sizes 1x8,64x8 --transport socket --delay-ms 0.1 --rounds 1 --json",
    "bench.engine": "--make {tmp}/model --prefill-tokens 16 --batches 1 --prompt-tokens 16"
    " --output-tokens 2 --repeats 1 --json",
    "bench.etcd": "--minutes 0.2 --rate 5 --json",
    "bench.failover": "--engine fake --streams 2 --tokens 16 --rounds 1 --json",
    "bench.faults.heal_etcd": "--rounds 1 --json",
    "bench.fuzz": "--inputs 1000 --json",
    "bench.gpu": "--miniature --repeats 1 --output {tmp}/gpu.json",
    "bench.headline": "--rates 1 --rounds 1 --sessions 1 --turns 2 --first-prompt-tokens 64 --json",
    "bench.heal": "--links router-decode --faults reset --rounds 1 --json",
    "bench.jobs": "--jobs 200 --rounds 2 --requests 2 --queued 5 --json",
    "bench.keyless": "--connections 4 --message-bytes 65536 --json",
    "bench.kvstore": "--turns 1 --json",
    "bench.kvstore.faults": "--prompt-tokens 256 --rounds 1 --only EIO --json",
    "bench.kvstore.pins": "--rounds 1 --json",
    "bench.kvstore.pool": "--turns 1 --json",
    "bench.kvstore.remote": "--turns 1 --batches 2 --json",
    "bench.kvstore.ttft": "--prompt-tokens 1024 --rounds 1 --json",
    "bench.load": "--gb 0.01 --rounds 1 --dir {tmp} --json",
    "bench.overload": "--seconds 1 --rounds 1 --json",
    "bench.placement": "--workers 2 --agents-per-s 0.05 --json",
    "bench.placement.decision": "--workers 2 --decisions 20 --json",
    "bench.router": "--only throughput --api http --requests 8 --rounds 1 --json",
    "bench.router.fair": "--parts streams --streams 2 --requests 2 --fill-s 0.2 --json",
    "bench.router.unread": "--ways silent --streams 2 --seconds 1 --fill-s 0 --json",
    "bench.serve": "--up --sessions 2 --prefill 1 --decode 1 --no-drafts --json",
    "bench.siblings": "--siblings 2 --prefix 128 --own 64 --rounds 1 --json",
    "bench.start": "--rounds 1 --engine fake --json",
    "bench.structured": "--vocabulary 4000 --tokens 20 --dialogues 1 --json",
    "bench.worst_requests": "--rounds 1 --only stored --json",
    "bench.worst_requests.holds": "--rounds 1 --json",
}


def commands() -> list[str]:
    found = []
    for path in sorted((ROOT / "bench").rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(part for part in parts if part != "__main__"))
    return found


def test_every_command_has_a_shortest_form() -> None:
    assert set(commands()) - CHILDREN - IMAGES == set(SHORTEST)


# A module that this process has imported already warns when it runs once more.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", SHORTEST)
def test_a_command_shows_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in (word for word in SHORTEST[command].split() if word.startswith("--")):
        assert flag in shown


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", SHORTEST)
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n * 100, "input_length": 1024, "output_length": 8, "hash_ids": [n % 4, 4 + n % 3]}
        for n in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [word.format(tmp=tmp_path, trace=trace) for word in SHORTEST[command].split()]
    ran = subprocess.run(
        [sys.executable, "-m", command, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    # 1: the benchmark ran, and its condition does not hold in so short a run or on so busy a machine.
    assert ran.returncode == 0 or (ran.returncode == 1 and "Traceback" not in ran.stderr), ran.stderr[-2000:]
    assert ran.stdout.strip()
    if "--json" in arguments:
        json.loads(ran.stdout.strip().splitlines()[-1] if command == "bench.cache.compare" else ran.stdout)
