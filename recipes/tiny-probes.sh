#!/usr/bin/env bash
# Every score of a model card: a model beside its teachers on Pets, CamVid and room depth, and what its cores do.
#
# Command
#   recipes/tiny-probes.sh MODEL DATA OUT [OPTION …]
#   MODEL is a name, a file or a folder. DATA holds coco256-val.tar, pets-{trainval,test}.tar, camvid-{train,val,test}.tar
#   and roomdepth-{train,val}.tar. The options go to every probe, as --limit 200 for a quick try. After an interruption or
#   a kill, the same command resumes. The teachers: pip install 'veca[teachers]'
#
# Cost
#   24 minutes of an H200 and 16 cores for a model of one width, beside other work; checking labels has become faster since
#
# Result
#   OUT/results     report.html, report.md: all three by budget, width and resolution, beside the teachers
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
shift 3
more=(--no-progress "$@")
teachers=$(veca info --model "$model" --json | python -c '
import json, sys
teacher = json.load(sys.stdin)["provenance"].get("teacher", {})
print(*(each["name"] for each in teacher.get("teachers", [teacher]) if each))')

pets() {
  local task teacher pets=(--data 'pets-*.tar' --out "$out/results" "${more[@]}")
  for task in classify knn; do
    veca probe $task --model "$model" "${pets[@]}" --cores all --widths all
    for teacher in $teachers; do
      veca probe $task --model "$teacher" "${pets[@]}"
    done
    veca probe $task --model "$model" "${pets[@]}" --cores 8,64 --size 224,384,512,768,1024
  done
}

camvid=(--data 'camvid-*.tar' --steps 2000 "${more[@]}")
scenes() {
  local seed
  veca probe segment --model "$model" "${camvid[@]}" --cores all --widths all --size 384 --out "$out/results"
  for seed in 1 2; do
    veca probe segment --model "$model" "${camvid[@]}" --cores 8,64 --size 384 --seed $seed --out "$out/seeds"
  done
  veca probe segment --model "$model" "${camvid[@]}" --cores 8,64 --size 256,512,768 --out "$out/results"
}

rooms() {
  local room=(--data 'roomdepth-*.tar' --steps 500 --size 240 --out "$out/results" "${more[@]}") size teacher
  veca probe depth --model "$model" "${room[@]}" --cores all --widths all
  for teacher in $teachers; do
    veca probe depth --model "$teacher" "${room[@]}"
    veca probe segment --model "$teacher" "${camvid[@]}" --size 384,512 --out "$out/results"
    # A teacher's channels may have different scales; VECA's are normalised.
    veca probe segment --model "$teacher" "${camvid[@]}" --size 512 --norm standard --out "$out/results"
  done
  for size in 256 512; do
    veca cores --model "$model" coco256-val.tar --cores all --size $size --no-progress --out "$out/cores-$size.json"
  done
}

# In parallel: none of them keeps a GPU busy.
set -m # each is a process group, which ends as a whole
trap 'for job in $(jobs -p); do kill -- "-$job" 2> /dev/null || true; done' EXIT
trap 'exit 143' TERM
jobs=()
for part in pets scenes rooms; do
  $part &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
veca report "$out/results"
veca report "$out/seeds"
