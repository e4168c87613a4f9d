#!/bin/sh
# Prolog of slurm.conf, run as root on each node before a job: makes the directory in which the jobs of its user meet.
set -eu
root="${SUBLET_SLURM_ROOT:-/run/sublet}"
mkdir -p "$root"
chmod 755 "$root"
mkdir -p "$root/$SLURM_JOB_UID"
chown "$SLURM_JOB_UID" "$root/$SLURM_JOB_UID"
chmod 700 "$root/$SLURM_JOB_UID"
