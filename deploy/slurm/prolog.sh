#!/bin/sh
# Prolog of slurm.conf, run as root on each node before a job: makes the directory in which the jobs of its user meet. A file in
# `jobs` stands for each job that has it, for epilog.sh. It always ends with 0: else Slurm would drain the node.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
root="${SUBLET_SLURM_ROOT:-/run/sublet}"
dir="$root/$SLURM_JOB_UID"
mkdir -p "$root/jobs" && chmod 755 "$root" "$root/jobs" && (
    flock -w 30 9 && : >"$root/jobs/$SLURM_JOB_UID.$SLURM_JOB_ID" \
        && mkdir -p "$dir" && chown "$SLURM_JOB_UID" "$dir" && chmod 700 "$dir"
) 9>"$root/jobs/lock" || echo "sublet prolog: job $SLURM_JOB_ID: $dir could not be made" >&2
exit 0
