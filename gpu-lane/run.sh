#!/usr/bin/env bash
# Runs the GPU lane: bash run.sh [SUITE...], without arguments every suite.
#
# Suites: smoke conformance nccl legacy_ipc expandable rates
#         anytime_ddp anytime_deep anytime_tpdp anytime_pipeline anytime_graphs one_process rebuild
#         cycles deaths shortage watchdog zeroed
#         forks sharing generate unused attach compat torch_newest contents deep deep_libraries deep_tenants (of the Python package, from python/*.whl)
#         strangers graphs stepping replay nccl_alone race rl larger larger_ranks engines
# Lies next to gpu-lane/, gpu-tests/, benchmarks/, bin/sublet and lib/libsublet.so. Results go to $OUT (default ./results):
# one JSON file per suite and logs.txt. Every suite has its own time limit. GPUS limits the number of GPUs, CYCLES the
# cycles of nccl, MANY_CYCLES those of cycles, ANYTIME_PAUSES the pauses of the anytime suites, of rebuild, and of each of
# the five programs of one_process, ANYTIME_SEED their instants, also those of strangers. STRANGERS_PAUSES are the pauses of
# each of its rows, STRANGERS_ROWS the words, by comma, that rows to run have in their names. GRAPHS_CYCLES are the pauses
# of the idle process of graphs, and of the one that replays; STEPPING_PAUSES, STEPPING_ROWS, REPLAY_PAUSES and REPLAY_ROWS
# as those of strangers. RACE_CASES are the words, by comma, that cases of race to run have in their names, RACE_GIB what
# its processes hold each. TORCH_BACKENDS are the backends of process groups that torch_newest trains with (default: nccl),
# each with ANYTIME_PAUSES pauses and DEEP_PAUSES deep ones. RL_GPUS, RL_MODES, RL_SHAPE, RL_HANDOVER, RL_KV_GIB,
# RL_STEPS, RL_TOKENS, RL_GENERATIONS, RL_MICRO_BATCH and RL_REST_EVERY are those of rl/run.py, whose page is
# $OUT/rl_grpo.html; RL_TOO_LARGE are the modes that must run out of device memory. With NCCL_CUMEM_ENABLE set, nccl, rebuild and the
# anytime suites have files of results of their own; ANYTIME_LIMIT_S is the time that these may take.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# In the source tree it lies in gpu-lane.
[ -d "$HERE/gpu-lane" ] || HERE=$(dirname "$HERE")
OUT=${OUT:-$PWD/results}
PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-0}
CYCLES=${CYCLES:-20}
SUITES=(smoke conformance nccl legacy_ipc expandable rates
    anytime_ddp anytime_deep anytime_tpdp anytime_pipeline anytime_graphs one_process rebuild
    cycles deaths shortage watchdog zeroed forks sharing generate unused attach compat torch_newest contents deep deep_libraries deep_tenants
    strangers graphs stepping replay nccl_alone race rl larger larger_ranks engines)
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
    -h | --help) sed -n '2,20p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
if [ ! -f "$HERE/gpu-lane/common.py" ]; then echo "run.sh: $HERE/gpu-lane/common.py is missing" >&2; exit 2; fi
export PYTHONPATH=$HERE/gpu-lane:$HERE/gpu-tests:$HERE/benchmarks${PYTHONPATH:+:$PYTHONPATH}

# What tells records of NCCL without cuMem from others.
CUMEM=${NCCL_CUMEM_ENABLE:+_cumem$NCCL_CUMEM_ENABLE}
worst=0
kernel_lines() { timeout 5 dmesg 2>/dev/null | wc -l; }
DMESG_BEFORE=$(kernel_lines)

# suite FILE LIMIT_S SCRIPT [ARGS...]: one job, its own deadline 15 s before the outer one.
suite() {
    local file=$1 limit=$2 script=$3 code=0
    shift 3
    [ -f "$HERE/gpu-tests/$script" ] && script=gpu-tests/$script || script=benchmarks/$script
    echo "== $file: $script $* (at most $limit s)"
    timeout -k 10 "$limit" "$PYTHON" "$HERE/$script" --out "$OUT/$file.json" --logs "$LOGS" \
        --gpus "$GPUS" --deadline $((limit - 25)) "$@" 2>&1 | tee -a "$OUT/.console"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { echo "== $file: $script ended with $code"; worst=1; }
}

run_smoke() { GPUS=1 suite smoke 175 selfcheck.py; }
run_conformance() { suite conformance 120 conformance.py -- ${CONFORMANCE_ARGS:-}; }
run_nccl() {
    suite "nccl$CUMEM" 290 nccl_job.py --nccl-only --control outside,inside,inside-one --cycles "$CYCLES" --rebuild-cycles 4
    suite "nccl_tensors$CUMEM" 290 nccl_job.py --tensors-gib 8 --discard-half --control outside,inside --cycles "$CYCLES" \
        --rebuild-cycles 1 --warm-host
}
run_legacy_ipc() { NCCL_CUMEM_ENABLE=0 suite legacy_ipc 120 nccl_job.py --nccl-only --control outside --cycles 2; }
run_expandable() {
    suite expandable 240 nccl_job.py --expandable --tensors-gib 8 --discard-half --control outside,inside-one \
        --cycles "${EXPANDABLE_CYCLES:-10}" --rebuild-cycles 1 --warm-host
}
run_zeroed() { GPUS=1 suite zeroed 290 zeroed_job.py --look-gib "${LOOK_GIB:-32}"; }

run_rates() { suite rates 200 rates_job.py; }
# anytime PROGRAM PAUSES LIMIT_S
anytime() {
    suite "anytime_$1$CUMEM" "${ANYTIME_LIMIT_S:-$3}" anytime_job.py --program "$1" --pauses "${ANYTIME_PAUSES:-$2}" --seed "${ANYTIME_SEED:-1}"
}
run_anytime_ddp() { anytime ddp 200 265; }
# Deep pauses of live communicators, ANYTIME_ACTIVE_MS of work for each. With NCCL_P2P_DISABLE=1 all that ranks exchange goes through NCCL's host memory, with
# NCCL_CUMEM_HOST_ENABLE=0 it has none of cuMemCreate. Each has a file of results of its own.
run_anytime_deep() {
    local file=anytime_deep$CUMEM${NCCL_P2P_DISABLE:+_p2p_disable$NCCL_P2P_DISABLE}
    suite "$file${NCCL_CUMEM_HOST_ENABLE:+_cumem_host$NCCL_CUMEM_HOST_ENABLE}" "${ANYTIME_LIMIT_S:-190}" anytime_job.py --program ddp --deep \
        --pauses "${ANYTIME_PAUSES:-40}" --active-ms "${ANYTIME_ACTIVE_MS:-300}" --pause-timeout 10 --seed "${ANYTIME_SEED:-1}"
}
run_anytime_tpdp() { anytime tpdp 100 190; }
run_anytime_pipeline() { anytime pipeline 100 190; }
run_anytime_graphs() { anytime graphs 100 190; }
# One process with all GPUs, 50 pauses a program.
run_one_process() {
    local program
    for program in one_parallel one_split one_jax one_nccl one_contents; do anytime "$program" 50 120; done
}
run_rebuild() { anytime rebuild 100 150; }
# NCCL's memory alone, while the processes run on.
run_nccl_alone() {
    suite nccl_alone 150 anytime_job.py --program tpdp --library nccl --pauses "${ANYTIME_PAUSES:-50}" \
        --seed "${ANYTIME_SEED:-1}"
}
run_cycles() { suite cycles 585 cycles_job.py --cycles "${MANY_CYCLES:-1000}"; }
run_deaths() { suite deaths 240 deaths_job.py; }
run_shortage() { suite shortage 120 shortage_job.py; }
run_watchdog() { suite watchdog 210 watchdog_job.py --beyond; }
run_sharing() { GPUS=1 suite sharing 135 sharing_job.py; }
run_generate() { GPUS=1 suite generate 245 generate_job.py --layers "${LAYERS:-32}"; }
run_unused() { GPUS=1 suite unused 115 unused_job.py; }
run_forks() { GPUS=1 suite forks 300 forks_job.py; }
run_compat() { GPUS=1 suite compat 115 compat_job.py; }
# Whichever torch is imported: regions, pools and graphs on one GPU, then training with each of TORCH_BACKENDS.
run_torch_newest() {
    local backend
    GPUS=1 suite torch_newest 90 torch_newest_job.py
    for backend in ${TORCH_BACKENDS:-nccl}; do
        suite "torch_newest_ddp_$backend" 110 anytime_job.py --program ddp --backend "$backend" \
            --pauses "${ANYTIME_PAUSES:-30}" --seed "${ANYTIME_SEED:-1}"
        suite "torch_newest_deep_$backend" 110 anytime_job.py --program ddp --backend "$backend" --deep \
            --pauses "${DEEP_PAUSES:-8}" --active-ms 300 --pause-timeout 10 --seed "${ANYTIME_SEED:-1}"
        # Sends and receives need two.
        [ "$GPUS" = 1 ] || suite "torch_newest_pipeline_$backend" 110 anytime_job.py --program pipeline \
            --backend "$backend" --pauses "${ANYTIME_PAUSES:-30}" --seed "${ANYTIME_SEED:-1}"
    done
}
run_contents() { GPUS=1 suite contents 115 contents_job.py; }
run_strangers() {
    suite strangers 590 strangers_job.py --pauses "${STRANGERS_PAUSES:-20}" --seed "${ANYTIME_SEED:-1}" \
        --rows "${STRANGERS_ROWS:-}"
}
# Graphs of a decoder, of many threads, of torch.compile, and with collectives whose buffers NCCL registers or does not.
run_graphs() {
    local register
    GPUS=1 suite graphs 200 graphs_job.py --cycles "${GRAPHS_CYCLES:-10}" --seed "${ANYTIME_SEED:-1}"
    GPUS=1 anytime graph_threads 50 120
    GPUS=1 suite graphs_compiled 165 strangers_job.py --rows reduce-overhead --pauses "${ANYTIME_PAUSES:-50}"
    for register in 0 1; do
        NCCL_GRAPH_REGISTER=$register suite "graphs_register$register" 120 anytime_job.py --program graphs \
            --pauses "${ANYTIME_PAUSES:-25}" --seed "${ANYTIME_SEED:-1}"
    done
}
# Inference and training engines that are installed: ENGINES_ROWS as STRANGERS_ROWS, ENGINES_SIZE of the model, ENGINES_PAUSES, ENGINES_DEEP, ENGINES_SWAPS and
# others that the rows read; ENGINES_GRPO_MODES those of grpo_trl, grpo_two, verl and fsdp4.
run_engines() {
    suite engines "${ENGINES_LIMIT_S:-595}" engines_job.py --seed "${ANYTIME_SEED:-1}" --rows "${ENGINES_ROWS:-}" \
        --size "${ENGINES_SIZE:-1.7b}" --grpo-modes "${ENGINES_GRPO_MODES:-}" \
        --sglang-attention "${ENGINES_SGLANG_ATTENTION:-triton}"
}
run_stepping() {
    suite stepping 590 stepping_job.py --pauses "${STEPPING_PAUSES:-200}" --seed "${ANYTIME_SEED:-1}" \
        --rows "${STEPPING_ROWS:-}"
}
run_replay() {
    GPUS=1 suite replay 590 replay_job.py --pauses "${REPLAY_PAUSES:-100}" --seed "${ANYTIME_SEED:-1}" \
        --rows "${REPLAY_ROWS:-}" --gap-ms 5,400 --pause-timeout 30
}
run_race() {
    suite race "${RACE_LIMIT_S:-285}" race_job.py --cases "${RACE_CASES:-}" --kept-gib "${RACE_GIB:-60}" \
        --swap-gib "${RACE_GIB:-60}"
}
# All five modes take some 15 minutes at 0.5B: restart starts a generator for each step.
run_rl() {
    GPUS=${RL_GPUS:-1} suite rl "${RL_LIMIT_S:-1190}" rl_job.py --modes "${RL_MODES:-all}" --shape "${RL_SHAPE:-0.5b}" \
        --handover "${RL_HANDOVER:-ipc}" --kv-gib "${RL_KV_GIB:-20}" --steps "${RL_STEPS:-20}" \
        --tokens "${RL_TOKENS:-192}" --generations "${RL_GENERATIONS:-16}" ${RL_MICRO_BATCH:+--micro-batch "$RL_MICRO_BATCH"} \
        --too-large "${RL_TOO_LARGE:-}" --rest-every "${RL_REST_EVERY:-0}"
}
# Deep pauses; DEEP_ROWS are the parts to run, by comma (`mps` only if it is named), DEEP_GIB the sizes of its processes, DEEP_CYCLES the cycles of two that
# share memory, DEEP_KILLS the commands that are killed, DEEP_DEATHS the processes.
run_deep() {
    GPUS=1 suite deep 590 deep_job.py --gib "${DEEP_GIB-0.5,16,48}" --cycles "${DEEP_CYCLES:-200}" \
        --kills "${DEEP_KILLS:-40}" --deaths "${DEEP_DEATHS:-6}" --seed "${ANYTIME_SEED:-1}" --rows "${DEEP_ROWS:-sizes,swap,kept,event,shared}"
}
# DEEP_LIBRARY_CYCLES deep pauses of a process of JAX, of CuPy, and of torch with 20 graphs; a restore on another GPU, if there is one.
run_deep_libraries() {
    suite deep_libraries 290 deep_job.py --rows "${DEEP_ROWS:-jax,cupy,graphs,other_gpu}" --library-cycles "${DEEP_LIBRARY_CYCLES:-20}"
}
# So many tenants whose contexts do not fit on the GPU together take turns: DEEP_TENANTS, each of DEEP_TENANT_GIB, with DEEP_ROOM_GIB for all of them,
# DEEP_ROUNDS turns each.
run_deep_tenants() {
    GPUS=1 suite deep_tenants "${DEEP_LIMIT_S:-290}" deep_job.py --tenants "${DEEP_TENANTS:-10}" --tenant-gib "${DEEP_TENANT_GIB:-4}" \
        --room-gib "${DEEP_ROOM_GIB:-6.5}" --rounds "${DEEP_ROUNDS:-6}"
}
# LARGER_ROWS, by comma, also those of larger_weights.py (`graphs` among them), 7b_bound, 7b, save_on_cpu, saved and saved_backward; LARGER_FRAMES, the device memory for state; LARGER_STEPS; LARGER_BATCH, sequences of 2,048 tokens a step.
run_larger() {
    GPUS=1 suite larger "${LARGER_LIMIT_S:-590}" larger_job.py --rows "${LARGER_ROWS:-resident,backward,after,pauses,tenth,fsdp2,torchao}" \
        --frames "${LARGER_FRAMES:-2GiB}" --steps "${LARGER_STEPS:-20}" --batch "${LARGER_BATCH:-8}"
}
# Two ranks that page on two GPUs.
run_larger_ranks() { GPUS=2 suite larger_ranks 150 larger_ranks_job.py --rows "${LARGER_RANKS_ROWS:-plain,two,two_256,one,weights}"; }
run_attach() { GPUS=1 suite attach 115 attach_job.py; }

# wanted NAME: runs the suite of that name, or says which there are.
wanted() {
    local each
    for each in "${SUITES[@]}"; do
        if [ "$each" = "$1" ]; then "run_$1"; return; fi
    done
    echo "run.sh: unknown suite '$1'; use all or one of: ${SUITES[*]}" >&2
    worst=2
}

: >"$OUT/.console"
for name in "${@:-all}"; do
    if [ "$name" = all ]; then
        for each in "${SUITES[@]}"; do wanted "$each"; done
    else
        wanted "$name"
    fi
done

{
    echo
    echo "===== console"
    cat "$OUT/.console"
    echo "===== new kernel messages"
    timeout 5 dmesg 2>/dev/null | tail -n +$((DMESG_BEFORE + 1)) | tail -n 200
} >>"$LOGS"
rm -f "$OUT/.console"
"$PYTHON" "$HERE/gpu-lane/compact.py" "$OUT"/*.json
# Keeps the log under 8 MiB: the end says most.
if [ "$(stat -c %s "$LOGS")" -gt 8388608 ]; then tail -c 8000000 "$LOGS" >"$LOGS.part" && mv "$LOGS.part" "$LOGS"; fi

echo
echo "==================== summary"
"$PYTHON" "$HERE/gpu-lane/summary.py" "$OUT" || worst=1
echo "NCCL WARN lines: $(grep -c 'NCCL WARN' "$LOGS")"
if [ "$DMESG_BEFORE" -gt 0 ]; then
    new=$(timeout 5 dmesg 2>/dev/null | tail -n +$((DMESG_BEFORE + 1)))
    echo "new kernel messages: $(printf '%s' "$new" | grep -c .), of the GPU driver: $(printf '%s' "$new" | grep -c -E 'Xid|NVRM')"
    printf '%s\n' "$new" | grep -E 'Xid|NVRM' | head -n 10
else
    echo "new kernel messages: not readable here"
fi
exit "$worst"
