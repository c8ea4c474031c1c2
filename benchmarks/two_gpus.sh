#!/usr/bin/env bash
# Two processes with a GPU each, checked against one process and timed: data parallel with a group of NCCL, with and
# without a sharded optimizer, and stages over NCCL. Arguments go to the last, processes.py. Needs the extra [hf].
# What hangs is ended; the exit code is 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=8 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

run() {
  echo "== $*"
  time timeout --kill-after 10 90 python -m torch.distributed.run --standalone --nproc-per-node 2 "$@" || failed=1
}

run -m tests.distributed.data_parallel nccl
run examples/data_parallel.py --check --steps 5
run examples/data_parallel.py --shard --check --steps 5
run examples/distributed_pipeline.py --check --steps 5
time env -u OMP_NUM_THREADS python benchmarks/processes.py "$@" || failed=1
exit $failed
