#!/bin/sh
# The steps of a release, which GitHub Actions, GitLab CI and Jenkins call.
#
#   release.sh first        build, sign and push a bundle, and make the channel
#   release.sh candidate    build, sign and push, and compare with the bundle that the channel serves; writes gate.md
#   release.sh rollout      move the channel to the candidate
#   release.sh back         move the channel to the bundle before
#
# Needs MANIFEST (a TOML file whose name is that of its bundle) and CHANNEL (oci://HOST/REPOSITORY:TAG).
# May have SIGNING_KEY (a file; without it the CI's identity signs), REQUESTS (a log of `prejit serve --log`)
# and FLEET (a directory of fingerprints). A step that fails has the exit status of prejit, such as 9 of the gate.
set -eu

: "${MANIFEST:?expected the path of a manifest}" "${CHANNEL:?expected oci://HOST/REPOSITORY:TAG}"
case ${CHANNEL##*/} in
?*:?*) ;;
*) # the candidate would go to a directory of this name
    echo "release.sh: CHANNEL: expected oci://HOST/REPOSITORY:TAG, found '$CHANNEL'" >&2
    exit 2
    ;;
esac
bundle=artifacts/$(basename "$MANIFEST" .toml)
candidate=${CHANNEL%:*}:candidate

digest() {
    json=$(prejit inspect "$1" --json) # a registry that is down ends the script here
    echo "$json" | sed -n 's/^  "digest": "\(.*\)",$/\1/p'
}

build() {
    prejit build "$MANIFEST" --output artifacts
}

push() {
    if [ -n "${SIGNING_KEY:-}" ]; then
        prejit sign "$bundle" --key "$SIGNING_KEY"
    else
        prejit sign "$bundle" --keyless
    fi
    prejit push "$bundle" "$candidate"
}

case ${1:-} in
first)
    build
    push
    prejit rollout "$CHANNEL" "$candidate"
    ;;
candidate)
    serving=$(digest "$CHANNEL")
    build
    if [ "$(digest "$bundle")" = "$serving" ]; then
        echo "$CHANNEL serves this bundle already: nothing to release" | tee gate.md
        exit 0
    fi
    push
    prejit gate "$CHANNEL" "$bundle" --markdown gate.md \
        ${REQUESTS:+--requests "$REQUESTS"} ${FLEET:+--fleet "$FLEET"}
    ;;
rollout)
    prejit rollout "$CHANNEL" "$candidate" ${FLEET:+--fleet "$FLEET"}
    ;;
back)
    prejit rollout "$CHANNEL" --back ${FLEET:+--fleet "$FLEET"}
    ;;
*)
    echo "release.sh: expected first, candidate, rollout or back, found '${1:-}'" >&2
    exit 2
    ;;
esac
