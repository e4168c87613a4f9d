#!/bin/sh
# TaskProlog of slurm.conf, run as the user before each task: Slurm puts what it prints into the environment of the task.
echo "export SUBLET_RUN_DIR=${SUBLET_SLURM_ROOT:-/run/sublet}/$(id -u)"
# A process that cannot join its tenant ends, where it would run on with its memory out of reach.
echo "export SUBLET_REQUIRED=1"
