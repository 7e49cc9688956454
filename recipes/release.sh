#!/usr/bin/env bash
# Everything after training: weights in float16, all probes, the quality-cost table for --compute, the model card.
#
# Command
#   recipes/release.sh RUN DATA OUT [OPTION …]
#   RUN is the folder of a finished `veca distill`, or a model. DATA is as in tiny-probes.sh, to which the options go. The
#   last part of OUT is the name in the card, as in runs/veca_tiny.TAG. After an interruption or a kill, the same command
#   resumes.
#
# Cost
#   that of tiny-probes.sh, and of timing each setting for the table, which is not measured yet
#
# Result
#   OUT/model       the weights with their table, and README.md, the card
#   OUT/trained     the same weights without the table: what was probed
#   OUT/results     pareto.svg, pareto.csv: score against measured time
#   OUT/…           the results of tiny-probes.sh
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '4,8s/^# \{0,3\}//p' "$0" >&2
  exit 2
fi
recipes=$(dirname "$(realpath "$0")")
run=$(realpath -m "$1")
data=$(realpath -m "$2")
out=$(realpath -m "$3")
shift 3
if [ ! -f "$run/model.safetensors" ]; then
  echo "release.sh: $run has no model.safetensors: name a finished run or the folder of a model" >&2
  exit 2
fi
if [ ! -d "$data" ]; then
  echo "release.sh: $data is no folder: name the one with the data of tiny-probes.sh" >&2
  exit 2
fi

classifier=()
[ ! -f "$run/classifier.safetensors" ] || classifier=(--classifier "$run/classifier.safetensors")
log=()
[ ! -f "$run/validation.csv" ] || log=(--run "$run")

# What is newer than what it is made of stays.
if [ ! "$out/trained/model.safetensors" -nt "$run/model.safetensors" ]; then
  veca convert --model "$run" --out "$out/trained" --dtype float16 --no-paths --overwrite "${classifier[@]}"
fi
"$recipes/tiny-probes.sh" "$out/trained" "$data" "$out" "$@"
if [ ! "$out/results/pareto.json" -nt "$out/trained/model.safetensors" ]; then
  veca probe pareto --model "$out/trained" --out "$out/results" --probe segment:camvid --batch-size 64
fi
veca convert --model "$out/trained" --table "$out/results/pareto.json" --out "$out/model" --overwrite
python "$recipes/../tools/card.py" "$out/model" --results "$out/results" "$out/seeds" "${log[@]}" \
  --name "$(basename "$out")" --out "$out/model/README.md"
