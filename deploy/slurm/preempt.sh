#!/bin/sh
# preempt.sh TENANT DIR [TIME], run as the job's user: has a job end by its own SIGTERM handler, though it may be paused. A paused process
# cannot run its handler, so the job is resumed first. If its GPUs have no room within TIME (20s), its contents are saved to DIR, and the
# handler runs when somebody resumes the job.
tenant="${1:?a tenant}" dir="${2:?a new directory}"
sublet resume "$tenant" --wait="${3:-20s}" || sublet save "$tenant" "$dir" || exit 1
pids=$(sublet ps "$tenant" --json | grep -o '"pid": *[0-9]*' | tr -dc '0-9\n' | sort -u)
# shellcheck disable=SC2086 # one word for each process
[ -n "$pids" ] && kill -TERM $pids
