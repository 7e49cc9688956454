#!/usr/bin/env bash
# What widths give and cost: VECA-tiny trained at several widths, and its control without them, from the same weights.
#
# Command
#   recipes/tiny-elastic.sh DATA OUT START [--set KEY=VALUE …]
#   DATA holds coco256-train-*.tar, coco256-val.tar, pets-{trainval,test}.tar and camvid-{train,val,test}.tar; START is a
#   model, as veca_tiny. The settings change both runs, as --set schedule.steps=3000. After an interruption or a kill, the
#   same command resumes.
#
# Cost
#   twice that of tiny-elastic.yaml, and the probes: not measured yet
#
# Result
#   OUT/model           the elastic weights in float16, with the quality-cost table for --compute
#   OUT/elastic         its run; OUT/control that of the control
#   OUT/results         report.html: both on Pets and CamVid, at both ends of budget and width
#   OUT/pets, camvid    pareto.svg, pareto.csv: score against measured time, of settings and of smaller images
#   OUT/gate.json       whether choosing a setting by content would pay
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '4,8s/^# \{0,3\}//p' "$0" >&2
  exit 2
fi
recipes=$(dirname "$(realpath "$0")")
out=$(realpath -m "$2")
start=$3
[ ! -e "$start" ] || start=$(realpath "$start")
cd "$1"
shift 3

# In one process, which decodes the images and runs the teacher on them once for both.
python "$recipes/../tools/ablate.py" "$recipes/tiny-elastic.yaml" --out "$out" --set 'data.train=coco256-train-*.tar' \
  --set data.validation=coco256-val.tar --set "model.start=$start" "$@" \
  --variant elastic --variant 'control model.elastic=null widths=null validation.widths=[1]'

pets() {
  local task
  for task in classify knn; do
    veca probe $task --model "$1" --data 'pets-*.tar' --no-progress "${@:2}"
  done
}
scenes() {
  veca probe segment --model "$1" --data 'camvid-*.tar' --steps 2000 --no-progress "${@:2}"
}
scenes_of_both() {
  local seed
  for seed in 0 1 2; do
    scenes "$out/elastic" --seed $seed --size 384 --cores 8,64 --widths 0.25,1 --out "$out/results"
    scenes "$out/control" --seed $seed --size 384 --cores 8,64 --out "$out/results"
  done
}
pets_of_both() {
  pets "$out/elastic" --size 256 --cores 8,64 --widths 0.25,1 --out "$out/results"
  pets "$out/control" --size 256 --cores 8,64 --out "$out/results"
}

# The weights that are released: their rows are those of the quality-cost table.
veca convert --model "$out/elastic" --out "$out/trained" --dtype float16 --no-paths --overwrite
settings() {
  local width
  for width in 1 0.5 0.25; do
    "$1" "$out/trained" --size "$2" --cores 8,32,64 --widths $width --out "$out/$3"
  done
  "$1" "$out/trained" --size "$4" --cores 8,64 --widths 0.25,1 --out "$out/$3"
}

# In parallel: none of them keeps a GPU busy.
set -m # each is a process group, which ends as a whole
trap 'for job in $(jobs -p); do kill -- "-$job" 2> /dev/null || true; done' EXIT
trap 'exit 143' TERM
pets_of_both &
jobs=($!)
scenes_of_both &
jobs+=($!)
settings pets 256 pets 160,192,224 &
jobs+=($!)
settings scenes 384 camvid 224,256,288,336 &
jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done

# Times, each alone.
veca probe pareto --model "$out/trained" --out "$out/camvid" --batch-size 64
veca probe pareto --model "$out/trained" --out "$out/pets" --batch-size 64
veca convert --model "$out/trained" --table "$out/camvid/pareto.json" --out "$out/model" --dtype float16 --no-paths --overwrite
python "$recipes/../tools/gate.py" --model "$out/trained" --images coco256-val.tar --out "$out/gate.json" --batch 64
veca report "$out/results"
