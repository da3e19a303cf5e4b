# What tests leave behind outside their own folders: processes, interfaces, packet rules, files. For scripts/test.
# Needs coreutils, grep and sed only; what else it asks may be missing. A trap may call left_behind at any time.
# shellcheck shell=bash

# In the environment of every process that the tests start; this shell began without it.
SESSION_VARIABLE=TRINITY_MQ_TEST_SESSION_MARK
ENDING_SECONDS=20

session= # empty until remember_what_is is over
own_tmp=
files_before=
network_before=
has_packet_rules=

# From here on temporary files go into a folder of their own, unless TMPDIR names one.
remember_what_is() {
    # only what can be seen before and after is compared: the tests' set-up may install iptables
    if [ "$(id -u)" = 0 ] && iptables-save >/dev/null 2>&1; then has_packet_rules=yes; fi
    files_before=$(files_now)
    network_before=$(network_now)
    if [ -z "${TMPDIR:-}" ]; then
        own_tmp=$(mktemp -d /tmp/tmqXXX) # short: sockets are made in it, whose paths have 107 characters at most
        export TMPDIR=$own_tmp
    fi
    session=$$.$RANDOM$RANDOM
    export "${SESSION_VARIABLE?}=$session"
}

# A line for each thing that was not there before; nothing where all is as it was.
left_behind() {
    if [ -z "$session" ]; then
        [ -z "$own_tmp" ] || rm -rf "$own_tmp"
        return
    fi
    export -n "${SESSION_VARIABLE?}"
    local deadline=$((SECONDS + ENDING_SECONDS))
    while [ -n "$(processes_now)" ] && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
    [ -z "$own_tmp" ] || rm -rf "$own_tmp"
    processes_now
    new_lines "$network_before" "$(network_now)"
    new_lines "$files_before" "$(files_now)"
}

# Lines of the second text that the first has not.
new_lines() { grep -vxF -f <(printf '\n%s\n' "$1") <<<"$2" || true; }

processes_now() {
    local environment pid command
    # -s: processes that are others' or have ended by now
    for environment in $(grep -slzxF "$SESSION_VARIABLE=$session" /proc/[0-9]*/environ); do
        pid=${environment//[^0-9]/}
        command=$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline") || true
        printf 'process %s %s\n' "$pid" "$command"
    done
}

network_now() {
    local interface
    for interface in /sys/class/net/*; do
        [ ! -e "$interface" ] || printf 'interface %s\n' "${interface##*/}"
    done
    [ -z "$has_packet_rules" ] || iptables-save 2>/dev/null | sed -n 's/ \[.*//; s/^[-:]/packet rule &/p' || true
}

files_now() {
    local path
    for path in {/tmp,/var/tmp,/dev/shm}/{tmq,trinity,vllm,pytest-of-}*; do
        [ ! -e "$path" ] || printf 'file %s\n' "$path"
    done
}
