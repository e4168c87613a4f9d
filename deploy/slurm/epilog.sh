#!/bin/sh
# Epilog of slurm.conf, run as root on each node after a job: removes the directory when no other job of its user is on the node.
set -eu
root="${SUBLET_SLURM_ROOT:-/run/sublet}"
others=$(squeue --noheader --format %A --user "$SLURM_JOB_UID" --nodelist "$SLURMD_NODENAME" --states running,suspended,completing)
for job in $others; do
    if [ "$job" != "$SLURM_JOB_ID" ]; then exit 0; fi
done
rm -rf -- "${root:?}/${SLURM_JOB_UID:?}"
