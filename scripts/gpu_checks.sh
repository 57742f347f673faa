#!/bin/sh
# Checks on a machine with a CUDA device, in less than $LIMIT_S (540) seconds, by a Python that has torch and
# Triton: nothing is installed. First the tests of what no device has run, then figures. Each part has a
# deadline, logs and figures go to $OUT, and the last lines say how each part ended.
set -u
python=${PYTHON:-python3}
out=${OUT:-.run/gpu-checks}
limit_s=${LIMIT_S:-540}
began_s=$(date +%s)
mkdir -p "$out"
: > "$out/summary.txt"
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED

# part NAME LOG SECONDS COMMAND...: what is left of the whole time bounds the seconds. At the deadline an
# interrupt lets pytest print its failures.
part() {
  name=$1 log=$out/$2.log most_s=$3
  shift 3
  left_s=$((limit_s - $(date +%s) + began_s))
  [ "$most_s" -lt "$left_s" ] || most_s=$left_s
  if [ "$most_s" -lt 10 ]; then
    echo "$name: left out" >> "$out/summary.txt"
    return
  fi
  part_began_s=$(date +%s)
  timeout -s INT -k 10 "$most_s" "$@" >> "$log" 2>&1
  status=$?
  echo "$name: status $status after $(($(date +%s) - part_began_s)) s: $(tail -n 1 "$log")" >> "$out/summary.txt"
}
tests() {
  name=$1 most_s=$2
  shift 2
  part "$name" tests "$most_s" "$python" -m pytest -v --tb=short -m gpu -p no:cacheprovider "$@"
}
report() {
  name=$1 most_s=$2
  shift 2
  part "$name" report "$((most_s + 10))" \
    "$python" -m bench.gpu --limit-s "$most_s" --repeats 10 --output "$out/$name.json" --only "$@"
}

part native report 60 "$python" server/native_build.py
tests step_graphs 150 tests/gpu/test_step_graphs.py
tests draft_heads 90 tests/gpu/test_draft_heads.py
tests page_copies 30 tests/gpu/test_cuda_memory.py -k "launched_step or checksum or reports_its_bytes or refuses"
report steps 130 steps_moonlight steps_kimi_k25_8_layers
tests programs 60 tests/gpu/test_programs.py
tests models 60 tests/gpu/test_kernels.py
tests groups 40 tests/gpu/test_device_groups.py
report figures 200 kernels sampling accuracy peers
cat "$out/summary.txt"
