#!/usr/bin/env bash
# Two processes with a GPU each, checked against one process and timed: data parallel with a group of NCCL, with and
# without a sharded optimizer, and stages over NCCL. Needs the extra [hf]. Run it from anywhere; the first failure ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=8 PYTHONPATH=$PWD

run() {
  echo "== $*"
  time python -m torch.distributed.run --standalone --nproc-per-node 2 "$@"
}

run -m tests.distributed.data_parallel nccl
run examples/data_parallel.py --check --steps 5
run examples/data_parallel.py --shard --check --steps 5
run examples/distributed_pipeline.py --check --steps 5
run examples/data_parallel.py --steps 50 --batch 64 --seq 512
run examples/data_parallel.py --shard --steps 50 --batch 64 --seq 512
