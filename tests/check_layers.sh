#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Layers point one way: python/zenflow -> src/bindings* -> src/ and cuda/. Prints every include that points another way.
set -uo pipefail
cd "${1:-$(dirname "$0")/..}"

broken=0
# forbid RULE PATTERN FILE...: no #include in the files may match the pattern.
forbid() {
  local rule=$1 pattern=$2
  shift 2
  if grep -nE "^[[:space:]]*#[[:space:]]*include[[:space:]]*[<\"]($pattern)" "$@" /dev/null; then
    echo "layers: $rule" >&2
    broken=1
  fi
}

shopt -s nullglob
core=(src/*.h src/*.cpp)
[ ${#core[@]} -gt 0 ] || { echo "layers: no sources under $PWD/src" >&2; exit 1; }
for i in "${!core[@]}"; do [[ ${core[$i]} != src/bindings* ]] || unset "core[$i]"; done
device=(cuda/*.h cuda/*.cu cuda/*.cpp)
device_headers=(cuda/device.h cuda/cuda_info.h cuda/stream.h cuda/column_norms.h cuda/edits.h cuda/scatter.h cuda/selective_adam.h
  cuda/slot_map.h cuda/top_k.h)
every=(src/*.h src/*.cpp "${device[@]}" tests/cpp/*.h tests/cpp/*.cpp)
per_isa=(src/kernels_*.cpp src/simd_*.h src/slots_avx512.h src/kernels_body.h src/update_body.h src/vector_loops.h)

forbid "nothing includes torch" "torch/|ATen/|c10/" "${every[@]}"
forbid "src/ knows no Python; only src/bindings* do" "Python\.h|pybind11/" "${core[@]}"
forbid "src/ knows no CUDA; only src/bindings* see cuda/" "cuda|cublas|driver_types" "${core[@]}"
forbid "cuda/ knows no Python" "Python\.h|pybind11/" "${device[@]}"
forbid "cuda/ headers that the bindings see need no CUDA header" "cuda_|cuda\.h|cuda/check|cuda/launch" "${device_headers[@]}"
# A standard-library template or inline function compiled here could be the one that the linker keeps for everybody.
forbid "files compiled per instruction set include intrinsics and the project's own headers alone" \
  "[a-hj-z]+>|i[a-ln-z][a-z]*>" "${per_isa[@]}"
frameworks="transformers|accelerate|lightning|peft|zenflow\.integrations"
if grep -rnE --include="*.py" --exclude-dir=integrations "^[[:space:]]*(import|from)[[:space:]]+($frameworks)\b" python/zenflow |
  grep -vE "^python/zenflow/planning/model_shapes\.py:[0-9]+: +import transformers$"; then
  echo "layers: frameworks are imported by python/zenflow/integrations alone, and that by users alone;" >&2
  echo "layers: but planning/model_shapes.py asks transformers for the shapes of a config" >&2
  broken=1
fi
exit $broken
