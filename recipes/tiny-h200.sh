#!/usr/bin/env bash
# The pretrained weights, from images to the scores of their card: both stages of training, then all probes.
#
# Command
#   recipes/tiny-h200.sh DATA OUT [START]
#   DATA holds coco256-train-*.tar and the files that tiny-probes.sh needs. With START, the weights of a first stage, only
#   the second stage runs. After an interruption or a kill, the same command resumes.
#
# Cost
#   that of tiny-h200.yaml, tiny-h200-stage2.yaml and tiny-probes.sh
#
# Result
#   OUT/model       the weights in float16
#   OUT/stage2      their run: report.html has the losses by budget and resolution
#   OUT/…           the results of tiny-probes.sh
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
veca convert --model "$out/stage2" --out "$out/model" --dtype float16 --no-paths --overwrite
"$recipes/tiny-probes.sh" "$out/model" . "$out"
