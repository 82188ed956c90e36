#!/usr/bin/env bash
# The same command on a list of hosts; the ranks are handed out:
#
#     ./train.sh 'node[1-4]' 4 8        # four hosts, eight ranks on each
#
# It runs here and there in the same directory, which every host has: a shared home, or a copy.
set -euo pipefail
hosts=${1:?which hosts, as pdsh -w takes them} number=${2:?how many hosts that is} each=${3:-1}
shift $(($# < 3 ? $# : 3))

# A name that no other start has: who is late for an earlier one does not get into this one.
job=digits-$(date +%s)-$$

# -S: end with the worst of the statuses.
exec pdsh -S -R ssh -w "$hosts" "
    cd '$PWD' || exit
    export MINGLE_JOB_ID='$job' WORLD_SIZE=$((number * each))
    seq $each | xargs -P $each -I{} python ddp_train.py ${*@Q}"
