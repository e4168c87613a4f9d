#!/usr/bin/env bash
# Runs the GPU lane: bash run.sh [smoke|conformance|nccl|train|ipc|legacy_ipc|kept|overhead|expandable|all]...
#
# Lies beside jobs/, bin/sublet and lib/libsublet.so. Results go to $OUT (default ./results): one JSON file per suite
# and logs.txt. Every suite has its own time limit. GPUS limits the number of GPUs, CYCLES the cycles.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${OUT:-$PWD/results}
PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-0}
CYCLES=${CYCLES:-20}
JOBS=$HERE/jobs
LOGS=$OUT/logs.txt
mkdir -p "$OUT" || exit 2

# NVLink multicast stays off unless the caller chose otherwise.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONUNBUFFERED=1
export PYTHONDONTWRITEBYTECODE=1
[ -x "$HERE/bin/sublet" ] && export SUBLET_BIN=${SUBLET_BIN:-$HERE/bin/sublet}
[ -x "$HERE/bin/conformance_gpu" ] && export SUBLET_CONFORMANCE=${SUBLET_CONFORMANCE:-$HERE/bin/conformance_gpu}
case "${1:-all}" in
    -h | --help) sed -n '2,6p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
if [ ! -f "$JOBS/common.py" ]; then echo "run.sh: $JOBS/common.py is missing" >&2; exit 2; fi

worst=0
kernel_lines() { timeout 5 dmesg 2>/dev/null | wc -l; }
DMESG_BEFORE=$(kernel_lines)

# suite FILE LIMIT_S SCRIPT [ARGS...]: one job, its own deadline 15 s before the outer one.
suite() {
    local file=$1 limit=$2 script=$3 code=0
    shift 3
    echo "== $file: $script $* (at most $limit s)"
    timeout -k 10 "$limit" "$PYTHON" "$JOBS/$script" --out "$OUT/$file.json" --logs "$LOGS" \
        --gpus "$GPUS" --deadline $((limit - 25)) "$@" 2>&1 | tee -a "$OUT/.console"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { echo "== $file: $script ended with $code"; worst=1; }
}

run_smoke() { GPUS=1 suite smoke 175 selfcheck.py; }
run_conformance() { suite conformance 120 conformance.py -- ${CONFORMANCE_ARGS:-}; }
run_nccl() {
    suite nccl 290 nccl_job.py --nccl-only --control outside,inside,inside-one --cycles "$CYCLES" --rebuild-cycles 4
    suite nccl_tensors 290 nccl_job.py --tensors-gib 8 --discard-half --control outside,inside --cycles "$CYCLES" \
        --rebuild-cycles 1 --warm-host
}
run_train() { suite train 150 train_job.py; }
run_ipc() { GPUS=1 suite ipc 90 ipc_job.py; }
run_legacy_ipc() { NCCL_CUMEM_ENABLE=0 suite legacy_ipc 120 nccl_job.py --nccl-only --control outside --cycles 2; }
run_kept() { suite kept 200 kept_job.py --kept-gib "${KEPT_GIB:-16}" --cycles 10; }
run_overhead() { suite overhead 240 overhead_job.py; }
run_expandable() {
    suite expandable 240 nccl_job.py --expandable --tensors-gib 8 --discard-half --control outside,inside-one \
        --cycles "${EXPANDABLE_CYCLES:-10}" --rebuild-cycles 1 --warm-host
}

: >"$OUT/.console"
for name in "${@:-all}"; do
    case "$name" in
        smoke | conformance | nccl | train | ipc | legacy_ipc | kept | overhead | expandable) "run_$name" ;;
        all) for each in smoke conformance nccl train ipc legacy_ipc kept overhead expandable; do "run_$each"; done ;;
        *) echo "run.sh: unknown suite '$name'; use smoke, conformance, nccl, train, ipc, legacy_ipc, kept, overhead, expandable or all" >&2; worst=2 ;;
    esac
done

{
    echo
    echo "===== console"
    cat "$OUT/.console"
    echo "===== new kernel messages"
    timeout 5 dmesg 2>/dev/null | tail -n +$((DMESG_BEFORE + 1)) | tail -n 200
} >>"$LOGS"
rm -f "$OUT/.console"
"$PYTHON" "$JOBS/compact.py" "$OUT"/*.json
# Keeps the log under 8 MiB: the end says most.
if [ "$(stat -c %s "$LOGS")" -gt 8388608 ]; then tail -c 8000000 "$LOGS" >"$LOGS.part" && mv "$LOGS.part" "$LOGS"; fi

echo
echo "==================== summary"
"$PYTHON" "$JOBS/summary.py" "$OUT" || worst=1
echo "NCCL WARN lines: $(grep -c 'NCCL WARN' "$LOGS")"
if [ "$DMESG_BEFORE" -gt 0 ]; then
    new=$(timeout 5 dmesg 2>/dev/null | tail -n +$((DMESG_BEFORE + 1)))
    echo "new kernel messages: $(printf '%s' "$new" | grep -c .), of the GPU driver: $(printf '%s' "$new" | grep -c -E 'Xid|NVRM')"
    printf '%s\n' "$new" | grep -E 'Xid|NVRM' | head -n 10
else
    echo "new kernel messages: not readable here"
fi
exit "$worst"
