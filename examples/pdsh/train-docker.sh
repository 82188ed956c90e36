#!/usr/bin/env bash
# As train.sh, each rank in a container of an image that every host has:
#
#     ./train-docker.sh 'node[1-4]' 4 8 mingle-demo
#
# The containers use the network of their host, because multicast does not leave Docker's own networks. For GPUs add
# --gpus all, and start one container with torchrun on each host: containers are nodes, and each would take GPU 0.
set -euo pipefail
hosts=${1:?which hosts, as pdsh -w takes them} number=${2:?how many hosts that is}
each=${3:?how many ranks on each} image=${4:?the image to run}
shift 4
job=${USER:-$(id -un)}-digits-$(date +%s)-$$

exec pdsh -S -R ssh -w "$hosts" "
    seq $each | xargs -P $each -I{} docker run --rm --init --network host --ipc host \\
        --env MINGLE_JOB_ID='$job' --env WORLD_SIZE=$((number * each)) \\
        '$image' python ddp_train.py ${*@Q}"
