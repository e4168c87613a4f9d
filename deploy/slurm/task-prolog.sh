#!/bin/sh
# TaskProlog of slurm.conf, run as the user before each task: Slurm puts what it prints into the environment of the task.
echo "export SUBLET_RUN_DIR=${SUBLET_SLURM_ROOT:-/run/sublet}/$(id -u)"
