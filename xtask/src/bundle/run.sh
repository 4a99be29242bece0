#!/bin/sh
# Runs Deepwell out of this folder, on a machine with neither Rust nor nvcc.
#
#   ./run.sh test [NAME...]    the tests of the kernels and of training on a GPU
#   ./run.sh parity [FLAGS]    `deepwell parity`: MXFP8 beside BF16
#   ./run.sh bench [FLAGS]     `deepwell bench`
#   ./run.sh tune [FLAGS]      `deepwell tune`: kernels by measured times, in ./target/tuned
#   ./run.sh train [FLAGS]     `deepwell train`
#   ./run.sh deepwell ARGS     the command as it is, with the kernels of this folder
#
# `parity` and `train` read the corpus of this folder and run on the GPU unless FLAGS say otherwise.
# What they write goes to ./target, or where `--out` says. Variables:
#   DEEPWELL_KERNELS_DIR   other kernels than those of this folder
#   DEEPWELL_CORPUS_DIR    where the archives are unpacked; default: the folder of this file
#   TMPDIR                 where tests are unpacked while they run; it must allow programs
#   DEEPWELL_REQUIRE_GPU   set to nothing: tests are skipped where there is no GPU
set -eu

here=$(cd "$(dirname "$0")" && pwd)

usage() {
    sed -n 's/^# \{0,1\}//; 2,/^set /{/^set /!p;}' "$0"
}

# Prints the folder that NAME.tar.gz is unpacked to, and unpacks it the first time: unpacked NAME
# The folder's name has the archive's checksum: files of another bundle are never taken instead.
unpacked() {
    parent=${DEEPWELL_CORPUS_DIR:-$here}
    folder=$parent/$1.$(cksum <"$here/$1.tar.gz" | cut -d ' ' -f 1)
    if [ ! -d "$folder" ]; then
        mkdir -p "$parent"
        partial=$parent/.$1.$$
        mkdir "$partial"
        tar -xzf "$here/$1.tar.gz" -C "$partial"
        # Under its name only once it is whole; somebody else may have been first.
        mv "$partial/$1" "$folder" 2>/dev/null || [ -d "$folder" ]
        rm -rf "$partial"
    fi
    echo "$folder"
}

# Whether a flag is among the arguments: has FLAG "$@"
has() {
    flag=$1
    shift
    for argument in "$@"; do
        case $argument in
        "$flag" | "$flag="*) return 0 ;;
        esac
    done
    return 1
}

# `deepwell train` or `parity` with what the bundle adds.
trains() {
    if has --help "$@" || has -h "$@"; then exec "$deepwell" "$@"; fi
    # A run file has its own.
    if ! has --run-file "$@"; then
        if ! has --data "$@"; then
            text=$(unpacked corpus)
            set -- "$@" --data "$text"
        fi
        if ! has --device "$@"; then set -- "$@" --device cuda; fi
    fi
    exec "$deepwell" "$@"
}

tests() {
    # On a machine that this is carried to, a test without a GPU is a failure.
    export DEEPWELL_REQUIRE_GPU="${DEEPWELL_REQUIRE_GPU-1}"
    if [ -z "$DEEPWELL_REQUIRE_GPU" ]; then unset DEEPWELL_REQUIRE_GPU; fi
    # For tests that run the command.
    export DEEPWELL_COMMAND="${DEEPWELL_COMMAND:-$deepwell}"
    failed=
    # Not kept: tests of another bundle must never run in place of these.
    programs=$(mktemp -d)
    trap 'rm -rf "$programs"' EXIT
    tar -xzf "$here/tests.tar.gz" -C "$programs"
    for program in "$programs"/tests/*; do
        echo "== ${program##*/}"
        "$program" "$@" || failed="$failed ${program##*/}"
    done
    if [ -n "$failed" ]; then
        echo "failed:$failed" >&2
        return 1
    fi
}

case ${1:-} in
test | parity | train | bench | tune | deepwell)
    DEEPWELL_KERNELS_DIR=${DEEPWELL_KERNELS_DIR:-$(unpacked kernels)}
    export DEEPWELL_KERNELS_DIR
    deepwell=$(unpacked command)/deepwell
    ;;
esac

case ${1:-} in
test)
    shift
    tests "$@"
    ;;
parity | train) trains "$@" ;;
bench | tune) exec "$deepwell" "$@" ;;
deepwell)
    shift
    exec "$deepwell" "$@"
    ;;
-h | --help | help) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
