#!/usr/bin/env bash
# Runs the tests of both interpreters at once, so that one computes while the other waits. They share one build
# cache. The lines of the second interpreter come at the end.
set -uo pipefail
shared=$(mktemp -d)
trap 'rm -rf "$shared"' EXIT
export PREJIT_TEST_CACHE="$shared/build-cache"

"$1" --no-print-directory test-other >"$shared/other.log" 2>&1 &
other=$!
"$1" --no-print-directory test-main
main=$?
echo 'the other interpreter:'
wait $other
status=$?
cat "$shared/other.log"
exit $((main || status))
