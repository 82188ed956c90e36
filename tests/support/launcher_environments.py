"""What launchers leave in a process's environment.

Those of Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 4.0 and Intel MPI 2021.18 were printed by a process that the launcher
had started (tests/launchers starts most of them again). The others are put together from the launchers' sources and
documents.
"""

from __future__ import annotations

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# srun -n 4 on two nodes; ranks go round the nodes by default here
SRUN = {
    "SLURMD_NODENAME": "node2",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "1,3",
    "SLURM_JOBID": "1",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "5000",
}
SRUN_PMI2 = {**SRUN, "PMI_FD": "12", "PMI_JOBID": "1.0", "PMI_RANK": "3", "PMI_SIZE": "4"}
# salloc -n 4 srun -n 1: of the allocation's two nodes and four tasks the step takes one of each
SRUN_OF_ONE = {
    **SRUN,
    "SLURMD_NODENAME": "node1",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
# the place of the script's own one task, and the size of the whole allocation
SBATCH_BODY = {
    "SLURMD_NODENAME": "node1",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GTIDS": "0",
    "SLURM_JOBID": "3",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "5041",
}
SALLOC_SHELL = {
    "SLURM_JOBID": "4",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# with LaunchParameters=use_interactive_step salloc's shell is a step of one task, with a reserved id
SALLOC_INTERACTIVE_STEP = {
    **SALLOC_SHELL,
    "SLURM_STEP_ID": str(0xFFFFFFFA),
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
}
OPEN_MPI = {
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "932315137",
    "PMIX_RANK": "1",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-19962@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL_MPI = {
    "HYDRA_BSTRAP_NODE_ID": "1",
    "HYDRA_BSTRAP_PROXY_ID": "1",
    "I_MPI_HYDRA_UUID": "8c4c0000-875d-9ab7-bc60-060032a30f42",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
# mpiexec inside an sbatch script on two nodes: Slurm started one proxy on each, and this one's processes inherit
MPICH_UNDER_SLURM = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"} | {
    **MPICH,
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALNRANKS": "4",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "13",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "12",
    "PALS_NODEID": "1",
    "PALS_APID": "6e4b28c4-5fc5-4a5b-8b3b-9c4a0d2f3f10",
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "4711",
    "LSB_JOBINDEX": "0",
    # Spectrum MPI's
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12",
    "PMIX_NAMESPACE": "2",
}
FLUX = {
    "FLUX_JOB_ID": "ƒ2xVXmy3w",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "3",
    "PMI_FD": "20",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "HOSTNAME": "trainer-2"}
LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "trainer-0.trainer.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
# the operator's first version; "auto" is its default
PYTORCH_JOB = {
    "MASTER_ADDR": "trainer-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "trainer-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "auto",
    "RANK": "2",
    "WORLD_SIZE": "4",
}
PYTORCH_JOB_OF_8_PER_POD = {**PYTORCH_JOB, "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "32"}
# the second
TRAIN_JOB = {
    "PET_MASTER_ADDR": "trainer-node-0-0.trainer",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2","algo-10"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "TRAINING_JOB_NAME": "resnet-2026-11-20",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-20-10-11-12-123456_resnet_7-0",
}
AWS_BATCH = {
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_ID": "6f4b7d0e-7d1c-4d3e-9a55-0a1b2c3d4e5f#1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_NUM_NODES": "2",
}

BY_LAUNCHER = {
    "torchrun": TORCHRUN,
    "jsrun": JSRUN,
    "Open MPI": OPEN_MPI,
    "MVAPICH2": MVAPICH2,
    "PALS": PALS,
    "Flux": FLUX,
    "Hydra (MPICH, Intel MPI)": MPICH,
    "Slurm": SRUN,
    "PMI": {"PMI_RANK": "1", "PMI_SIZE": "2"},
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "Kubeflow": PYTORCH_JOB,
    "SageMaker": SAGEMAKER,
    "SkyPilot": SKYPILOT,
    "AWS Batch": AWS_BATCH,
    "Kubernetes Indexed Job": INDEXED_JOB,
}
"""For each row of the table, by its name, one whole environment."""
