#!/usr/bin/env bash
# The tests of `make test`, under the kernels of other processors and with several threads, one after the other.
# Usage: tests/processors.sh PYTHON [PYTEST ARGUMENT ...]; FEDSHIFT_WORKERS says how many run at a time (2).
set -uo pipefail
cd "$(dirname "$0")/.."
python="$1"
shift
failed=()
under() {
  local name="$*"
  echo "== $name"
  env OMP_NUM_THREADS=1 "$@" "$python" -m pytest -n "${FEDSHIFT_WORKERS:-2}" --dist loadfile -m "not slow and not cluster" "${arguments[@]}" ||
    failed+=("$name")
}
arguments=("$@")
under ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
under ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
under ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE
under MKL_CBWR=COMPATIBLE
under OMP_NUM_THREADS=2
under OMP_NUM_THREADS=4
[ ${#failed[@]} -eq 0 ] && echo "all pass" && exit
printf 'failed: %s\n' "${failed[@]}"
exit 1
