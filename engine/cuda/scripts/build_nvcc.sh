#!/usr/bin/env bash
# Builds everything of sources.txt with nvcc, for machines without CMake.
#
#   CUDA_HOME         the toolkit; not set: nvcc on PATH. NVCC: this nvcc, whatever else is there
#   KDTREE_CUDA_ARCH  one architecture or a list (90,120); 80-virtual is PTX for sm_80 and all later ones
#   KDTREE_BUILD_DIR  where to, from engine/cuda; default build
#   JOBS              compilers at a time; default one a core
set -euo pipefail
cd "$(dirname "$0")/.."

out=${KDTREE_BUILD_DIR:-build}
jobs=${JOBS:-$(nproc)}
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/}nvcc}
if ! command -v "$nvcc" >/dev/null; then
  echo "no nvcc: '$nvcc' cannot be run; set CUDA_HOME to a CUDA 13 toolkit (python3 -m engine toolkit makes one of wheels)" >&2
  exit 1
fi

# For each architecture: what nvcc is told, the same for a file that needs wgmma, and what the library says of itself.
read -ra words <<<"$(tr ',;' '  ' <<<"${KDTREE_CUDA_ARCH:-90 100 120 80-virtual}")"
gencode=() gencode_wgmma=() names=()
for word in "${words[@]}"; do
  if [[ $word =~ ^([0-9]+)-virtual$ ]]; then
    option=-gencode=arch=compute_${BASH_REMATCH[1]},code=compute_${BASH_REMATCH[1]}
    names+=("ptx_${BASH_REMATCH[1]}")
  elif [[ $word =~ ^[0-9]+$ ]]; then
    option=-gencode=arch=compute_$word,code=sm_$word
    names+=("sm_$word")
    if [ "$word" = 90 ] && grep -Eq '^kernel[[:space:]].*[[:space:]]wgmma' sources.txt; then names+=(sm_90a); fi
  else
    echo "KDTREE_CUDA_ARCH: '$word' is no architecture, expected a number such as 90, or 80-virtual" >&2
    exit 1
  fi
  gencode+=("$option")
  gencode_wgmma+=("${option//_90/_90a}")
done

# Strict rounding: no fast-math, and a*b+c is fused only where the source says fma.
flags=(-O3 -fmad=false -lineinfo -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden,-ffp-contract=off
  -I. -Iinclude -I../../kdtr/include "-DKDTREE_ARCHITECTURES=\"${names[*]}\"")

sources() { # stage: its lines, without the stage
  awk -v stage="$1" '{ sub(/#.*/, "") } $1 == stage { print $2, $3 }' sources.txt
}

object() { # path: where its object goes
  echo "$out/objects/$(basename "$1").o"
}

wait_for_all() { # waits for the jobs begun, fails if one failed
  local status=0 job
  for job in "${running[@]}"; do wait "$job" || status=1; done
  running=()
  return $status
}

running=()
begin() { # command...: runs it beside the others, at most $jobs at a time
  if [ "${#running[@]}" -ge "$jobs" ]; then
    wait "${running[0]}"
    running=("${running[@]:1}")
  fi
  "$@" &
  running+=($!)
}

compile() { # path, wgmma or nothing
  local options=("${gencode[@]}")
  [ "${2-}" = wgmma ] && options=("${gencode_wgmma[@]}")
  case $1 in
    *.c) options+=(-Xcompiler -std=c99) ;;
    *) options+=(-std=c++17) ;;
  esac
  # From the full path: a test finds its golden files beside itself.
  "$nvcc" "${options[@]}" "${flags[@]}" -c "$PWD/$1" -o "$(object "$1")"
}

objects_of() { # stage: compiles its files; their objects are then in ${objects[@]}
  objects=()
  while read -r path flag; do
    echo "  $path"
    begin compile "$path" "$flag"
    objects+=("$(object "$path")")
  done < <(sources "$1")
  if [ "${#objects[@]}" = 0 ]; then echo "  no $1 sources yet"; fi
  wait_for_all
}

programs_of() { # stage, what to link each of its files with...
  local stage=$1 path
  shift
  objects_of "$stage"
  while read -r path _; do
    begin "$nvcc" -cudart=static -nodlink "$(object "$path")" "$@" -o "$out/$(basename "${path%.*}")"
  done < <(sources "$stage")
  wait_for_all
}

mkdir -p "$out/objects"

echo "[1/5] kernel objects"
objects_of kernel
library=("${objects[@]}")

echo "[2/5] engine objects"
objects_of engine
library+=("${objects[@]}")

echo "[3/5] shared C-ABI lib"
"$nvcc" -shared -cudart=static -nodlink -Xlinker -z,defs "${library[@]}" -o "$out/libkdtree_engine.so"
echo "  libkdtree_engine.so: ${names[*]}"

echo "[4/5] kernel unit tests + bench"
programs_of ktest "${library[@]}"
programs_of bench "${library[@]}"

echo "[5/5] engine tests + demo"
programs_of etest "-L$out" -lkdtree_engine -Xlinker '-rpath,$ORIGIN'
programs_of demo "-L$out" -lkdtree_engine -Xlinker '-rpath,$ORIGIN'

echo "done -> $out/"
