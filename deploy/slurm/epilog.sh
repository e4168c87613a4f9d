#!/bin/sh
# Epilog of slurm.conf, run as root on each node after a job: removes the directory that prolog.sh made for it, when no other job
# has it and no living process meets others there. It asks no scheduler. It always ends with 0: else Slurm would drain the node.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
root="${SUBLET_SLURM_ROOT:-/run/sublet}"
dir="$root/$SLURM_JOB_UID"
gone="$root/jobs/gone.$SLURM_JOB_ID"

say() {
    echo "sublet epilog: job $SLURM_JOB_ID: $*" >&2
    logger -t sublet-epilog "job $SLURM_JOB_ID: $*" 2>/dev/null
}

# Does a living process name the directory, or have a socket in it? Also if that cannot be looked at.
is_lived_in() {
    timeout 30 grep -qszxF "SUBLET_RUN_DIR=$dir" /proc/[0-9]*/environ
    case $? in 1 | 2) ;; *) return 0 ;; esac
    timeout 30 grep -qF " $dir/" /proc/net/unix
    [ $? -ne 1 ]
}

# Moves the directory out of the way of the next job's prolog. Fails when it stays.
take() {
    case "$SLURM_JOB_UID:$SLURM_JOB_ID" in
        :* | *: | *:*:* | *[!0-9:]*) say "no numbers of a user and a job" && return 1 ;;
    esac
    flock -w 30 9 || { say "$dir stays: no lock" && return 1; }
    rm "$root/jobs/$SLURM_JOB_UID.$SLURM_JOB_ID" || { say "$dir stays: it was not made for this job" && return 1; }
    for other in "$root/jobs/$SLURM_JOB_UID."*; do
        if [ -e "$other" ]; then say "$dir stays: another job has it" && return 1; fi
    done
    if is_lived_in; then say "$dir stays: a living process meets others there" && return 1; fi
    mv -T -- "$dir" "$gone" || { say "$dir stays: it cannot be moved" && return 1; }
}

if take 9>"$root/jobs/lock"; then
    if timeout 60 rm -rf -- "$gone"; then say "$dir is removed"; else say "$gone could not be removed"; fi
fi
exit 0
