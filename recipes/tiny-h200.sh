#!/usr/bin/env bash
# The weights that ship, from pictures to the numbers of their card: both stages of training, then all probes.
#
# Command
#   recipes/tiny-h200.sh DATA OUT [START]
#   DATA holds coco256-train-*.tar and what tiny-probes.sh wants. With START, weights that a first stage left, the second
#   begins from those. Interrupted or killed, the same command goes on from where it was.
#
# Cost
#   that of tiny-h200.yaml, tiny-h200-stage2.yaml and tiny-probes.sh
#
# Result
#   OUT/model       the weights in float16, as they ship
#   OUT/stage2      their run: report.html has the losses by budget and resolution
#   OUT/…           what tiny-probes.sh finds
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '4,7s/^# \{0,3\}//p' "$0" >&2
  exit 2
fi
recipes=$(dirname "$(realpath "$0")")
out=$(realpath -m "$2")
start=${3:+$(realpath "$3")}
cd "$1"

coco=(--set 'data.train=coco256-train-*.tar' --set data.validation=coco256-val.tar)
if [ -z "$start" ]; then
  veca distill "$recipes/tiny-h200.yaml" "${coco[@]}" --out "$out/stage1"
  start=$out/stage1
fi
veca distill "$recipes/tiny-h200-stage2.yaml" "${coco[@]}" --set "model.start=$start" --out "$out/stage2"
veca convert "$out/stage2" "$out/model" --dtype float16 --no-paths --overwrite
"$recipes/tiny-probes.sh" "$out/model" . "$out"
