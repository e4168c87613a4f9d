#!/usr/bin/env bash
# The main job with torch's expandable segments, where torch itself calls cuMemCreate and cuMemMap.
# Takes the options of nccl_job.py; some 60 to 120 s.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python3}" "$HERE/nccl_job.py" --expandable --tensors-gib 8 --discard-half --rebuild-cycles 0 "$@"
