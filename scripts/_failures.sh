# One line for a command that fails unforeseen, and so ends the script: where, and which. For scripts with `set -e`.
# shellcheck shell=bash

# Status 69 is passed on: whoever ended with it has said why.
tell_failure() {
    [ "$BASH_SUBSHELL" != 0 ] || [ "$1" = 69 ] || printf 'error: %s, line %s ended with %s: %s\n' "$3" "$4" "$1" "$2" >&2
}
set -E
trap 'tell_failure "$?" "$BASH_COMMAND" "${BASH_SOURCE[0]}" "$LINENO"' ERR
