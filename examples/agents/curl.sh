#!/usr/bin/env bash
# An agent in a shell that is trained through the gateway: three requests with curl, read with jq or Python.
#
#   trinity-mq serve examples/serve.yaml
#   examples/agents/curl.sh [--url URL] [--sessions 500]
set -euo pipefail

url=http://127.0.0.1:8710 sessions=500
while [ $# -gt 1 ]; do
    case $1 in
        --url) url=$2 ;;
        --sessions) sessions=$2 ;;
        *) echo "unknown option $1; wanted --url or --sessions" >&2 && exit 2 ;;
    esac
    shift 2
done

post() { curl --silent --show-error --fail-with-body --json "$2" "$url$1"; }

# The value of a key in JSON on one line, where it is text without quotes in it.
value() { sed -E "s/.*\"$1\": \"([^\"]*)\".*/\1/"; }

# Asks one question in a session of its own, and ends it with what the answer was worth.
session() {
    local a=$((RANDOM % 10)) b=$((RANDOM % 10)) c=$((RANDOM % 10)) right id answer said ended worth=0
    right=$(printf '%s\n' $a $b $c | sort | tail -1)
    id=$(post /sessions '{}' | value id)
    answer=$(post "/s/$id/v1/chat/completions" "{\"messages\": [{\"role\": \"user\", \"content\": \"$a,$b,$c=\"}]}")
    said=$(value content <<<"$answer") ended=$(value finish_reason <<<"$answer")
    case $said in "$right"*) worth=0.4 ;; esac
    [ "$said" != "$right" ] || [ "$ended" != stop ] || worth=1
    [ $worth != 0 ] || [ "$ended" != stop ] || [ ${#said} != 1 ] || worth=0.1
    post "/s/$id/end" "{\"reward\": $worth}" >/dev/null
    echo "$worth"
}

for ((done = 0; done < sessions; done += 8)); do
    for ((one = 0; one < 8; one++)); do session & done
    wait
done | awk '{ sum += $1 } NR % 100 == 0 { printf "%d sessions, reward of the last 100: %.3f\n", NR, sum / 100; sum = 0; fflush() }'
