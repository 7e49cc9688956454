#!/usr/bin/env bash
# Every score of a model card: a model beside EfficientNet-Lite2 on Pets, CamVid and room depth, and what its cores do.
#
# Command
#   recipes/tiny-probes.sh MODEL DATA OUT
#   MODEL is a name, a file or a folder. DATA holds coco256-val.tar, pets-{trainval,test}.tar, camvid-{train,val,test}.tar
#   and roomdepth-{train,val}.tar. After an interruption or a kill, the same command resumes.
#   The teacher: pip install 'veca[teachers]'
#
# Cost
#   24 minutes of an H200 and 16 cores, beside other work; checking labels has become faster since
#
# Result
#   OUT/results     report.html, report.md: all three by budget and resolution, beside the teacher
#   OUT/seeds       CamVid at both ends of the budget with other seeds
#   OUT/cores-*     what the cores do
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '4,8s/^# \{0,3\}//p' "$0" >&2
  exit 2
fi
model=$1
[ ! -e "$model" ] || model=$(realpath "$model")
out=$(realpath -m "$3")
cd "$2"

pets() {
  local task pets=(--data 'pets-*.tar' --no-progress --out "$out/results")
  for task in classify knn; do
    veca probe $task --model "$model" "${pets[@]}" --cores all
    veca probe $task --model efficientnet-lite2 "${pets[@]}"
    veca probe $task --model "$model" "${pets[@]}" --cores 8,64 --size 224,384,512,768,1024
  done
}

camvid=(--data 'camvid-*.tar' --steps 2000 --no-progress)
scenes() {
  local seed
  veca probe segment --model "$model" "${camvid[@]}" --cores all --size 384 --out "$out/results"
  for seed in 1 2; do
    veca probe segment --model "$model" "${camvid[@]}" --cores 8,64 --size 384 --seed $seed --out "$out/seeds"
  done
  veca probe segment --model "$model" "${camvid[@]}" --cores 8,64 --size 256,512,768 --out "$out/results"
}

rooms() {
  local room=(--data 'roomdepth-*.tar' --steps 500 --size 240 --no-progress --out "$out/results") size
  veca probe depth --model "$model" "${room[@]}" --cores all
  veca probe depth --model efficientnet-lite2 "${room[@]}"
  veca probe segment --model efficientnet-lite2 "${camvid[@]}" --size 384,512 --out "$out/results"
  # The teacher's channels have different scales; VECA's are normalised.
  veca probe segment --model efficientnet-lite2 "${camvid[@]}" --size 512 --norm standard --out "$out/results"
  for size in 256 512; do
    veca cores --model "$model" coco256-val.tar --cores all --size $size --no-progress --out "$out/cores-$size.json"
  done
}

# In parallel: none of them keeps a GPU busy.
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
pets &
first=$!
scenes &
second=$!
rooms
wait $first
wait $second
veca report "$out/results"
veca report "$out/seeds"
