#!/usr/bin/env bash
# Runs the tests that build_nvcc.sh built, a line each; fails if one fails or is not there.
# KDTREE_BUILD_DIR: as for build_nvcc.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${KDTREE_BUILD_DIR:-build}
passed=0 skipped=0 failed=0
while read -r path; do
  name=$(basename "${path%.*}")
  status=0
  said=$("$out/$name" 2>&1) || status=$?
  case $status in
    0)
      echo "PASS $name"
      passed=$((passed + 1))
      ;;
    77)
      echo "SKIP $name (${said#SKIP: })"
      skipped=$((skipped + 1))
      ;;
    *)
      echo "FAIL $name (exit status $status)"
      sed 's/^/  /' <<<"$said"
      failed=$((failed + 1))
      ;;
  esac
done < <(awk '{ sub(/#.*/, "") } $1 == "ktest" || $1 == "etest" { print $2 }' sources.txt)
echo "$passed passed, $skipped skipped, $failed failed"
[ "$failed" = 0 ]
