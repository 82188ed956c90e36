#!/usr/bin/env bash
# The same command on a list of hosts; mingle assigns the ranks:
#
#     ./train.sh 'node[1-4]' 4 8        # four hosts, eight ranks on each
#
# Every host needs this directory at the same place (a shared home, or a copy), and python with mingle in the PATH.
set -euo pipefail
hosts=${1:?which hosts, as pdsh -w takes them} number=${2:?how many hosts that is} each=${3:-1}
shift $(($# < 3 ? $# : 3))
cd "$(dirname "${BASH_SOURCE[0]}")/.." # where ddp_train.py lies

# A job id is a meeting point. No other user and no earlier start has this one.
job=${USER:-$(id -un)}-digits-$(date +%s)-$$

# -S: end with the worst of the statuses.
exec pdsh -S -R ssh -w "$hosts" "
    cd '$PWD' || exit
    export MINGLE_JOB_ID='$job' WORLD_SIZE=$((number * each))
    seq $each | xargs -P $each -I{} python ddp_train.py ${*@Q}"
