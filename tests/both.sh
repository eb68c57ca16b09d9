#!/usr/bin/env bash
# Runs the tests of both interpreters at once, so that one computes while the other waits. They share one build
# cache. The lines of the second interpreter come at the end.
#
# There are twice as many processes of tests as CPUs, because tests wait for processes and for disks. The first
# interpreter has three of four, because it has more to do.
set -uo pipefail
shared=$(mktemp -d)
trap 'rm -rf "$shared"' EXIT
export PREJIT_TEST_CACHE="$shared/build-cache"

processes=$((2 * $(nproc)))
second=$(((processes + 3) / 4))
"$1" --no-print-directory test-other WORKERS=$second >"$shared/other.log" 2>&1 &
other=$!
"$1" --no-print-directory test-main WORKERS=$((processes - second))
main=$?
echo 'the other interpreter:'
wait $other
status=$?
cat "$shared/other.log"
exit $((main || status))
