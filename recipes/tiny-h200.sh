#!/usr/bin/env bash
# The weights that ship, from pictures to the numbers of their card: both stages of training, then all probes.
#
# Command
#   recipes/tiny-h200.sh DATA OUT [START]
#   DATA holds coco256-train-*.tar, coco256-val.tar, pets-{trainval,test}.tar, camvid-{train,val,test}.tar and
#   roomdepth-{train,val}.tar. With START, weights that a first stage left, the second begins from those.
#   Interrupted or killed, the same command goes on from where it was.
#
# Cost
#   that of tiny-h200.yaml and tiny-h200-stage2.yaml; the probes have not been timed yet
#
# Result
#   OUT/model       the weights in float16, as they ship
#   OUT/stage2      their run: report.html has the losses by budget and resolution
#   OUT/results     report.html, report.md: Pets, CamVid and room depth by budget and resolution, beside the teacher
#   OUT/seeds       CamVid at both ends of the budget with other seeds
#   OUT/cores-*     what the cores do
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
veca convert "$out/stage2" "$out/model" --dtype float16 --no-paths --overwrite

whole_pictures() {
  local pets=(--data 'pets-*.tar' --out "$out/results" --no-progress)
  local task size
  for task in classify knn; do
    veca probe $task "$out/model" "${pets[@]}" --cores all
    veca probe $task efficientnet-lite2 "${pets[@]}"
    veca probe $task "$out/model" "${pets[@]}" --cores 8,64 --sizes 224,384,512,768,1024
  done
  for size in 256 512; do
    veca cores "$out/model" coco256-val.tar --cores all --size $size --no-progress --out "$out/cores-$size.json"
  done
}

scenes() {
  local camvid=(--data 'camvid-*.tar' --steps 2000 --no-progress) seed
  veca probe segment "$out/model" "${camvid[@]}" --cores all --sizes 384 --out "$out/results"
  for seed in 1 2; do
    veca probe segment "$out/model" "${camvid[@]}" --cores 8,64 --sizes 384 --seed $seed --out "$out/seeds"
  done
  veca probe segment "$out/model" "${camvid[@]}" --cores 8,64 --sizes 256,512,768 --out "$out/results"
}

rooms_and_teacher() {
  local room=(--data 'roomdepth-*.tar' --steps 500 --sizes 240 --no-progress --out "$out/results")
  veca probe depth "$out/model" "${room[@]}" --cores all
  veca probe depth efficientnet-lite2 "${room[@]}"
  # Its channels come at sizes of their own, those of VECA through a norm.
  veca probe segment efficientnet-lite2 --data 'camvid-*.tar' --steps 2000 --sizes 384,512 --norm standard \
    --no-progress --out "$out/results"
}

# Side by side: none keeps a GPU busy.
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
whole_pictures &
pictures=$!
scenes &
scenes=$!
rooms_and_teacher
wait $pictures
wait $scenes
veca report "$out/results"
veca report "$out/seeds"
