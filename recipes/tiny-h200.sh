#!/usr/bin/env bash
# The pretrained weights, from images to their card: both stages of training, then release.sh.
#
# Command
#   recipes/tiny-h200.sh DATA OUT [START]
#   DATA holds coco256-train-*.tar and the files that tiny-probes.sh needs. With START, the weights of a first stage, only
#   the second stage runs. The last part of OUT is the name in the card. After an interruption or a kill, the same command
#   resumes.
#
# Cost
#   that of tiny-h200.yaml, tiny-h200-stage2.yaml and release.sh
#
# Result
#   OUT/stage2      the run: report.html has the losses by budget and resolution
#   OUT/…           that of release.sh: OUT/model is the model with its card
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '4,8s/^# \{0,3\}//p' "$0" >&2
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
"$recipes/release.sh" "$out/stage2" . "$out"
