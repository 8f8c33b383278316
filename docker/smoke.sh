#!/bin/sh
# Whether an image works: smoke.sh BACKBONE, as docs/containers.md says, or debug where the GPU that it is for is not there.
# A folder of its own is left in /tmp.
set -eu
file=/opt/astuner/examples/math_agent/math_agent.yaml
cd "$(mktemp -d)"
test "$(id -u)" != 0 || { echo 'this image runs as root' >&2; exit 1; }
astuner doctor
astuner run "$file" --backbone debug
test "$1" = debug && exit
astuner run "$file" --backbone "$1" --no-resume astuner.data.train_batch_size=2 astuner.rollout.num_repeat=4 \
  astuner.trainer_common.total_steps=2 astuner.trainer_common.val_before_train=false astuner.data.max_validation_tasks=4
