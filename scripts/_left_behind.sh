# What tests leave behind outside their own folders: processes, interfaces, packet rules, files. For scripts/test.
# shellcheck shell=bash

# In the environment of every process that the tests start; this shell began without it.
SESSION_VARIABLE=TRINITY_MQ_TEST_SESSION_MARK
ENDING_SECONDS=20

# From here on temporary files go into a folder of their own, unless TMPDIR names one.
remember_what_is() {
    own_tmp=
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
    export -n "${SESSION_VARIABLE?}"
    local deadline=$((SECONDS + ENDING_SECONDS))
    while [ -n "$(processes_now)" ] && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
    [ -z "$own_tmp" ] || rm -rf "$own_tmp"
    processes_now
    comm -13 <(printf '%s\n' "$network_before") <(network_now)
    comm -13 <(printf '%s\n' "$files_before") <(files_now)
}

processes_now() {
    local environment pid
    for environment in /proc/[0-9]*/environ; do
        pid=${environment//[^0-9]/}
        ! grep -qzxF "$SESSION_VARIABLE=$session" "$environment" 2>/dev/null || ps -o pid=,args= -p "$pid" | sed 's/^/process /'
    done
}

network_now() {
    {
        local interfaces=(/sys/class/net/*)
        printf 'interface %s\n' "${interfaces[@]##*/}"
        [ "$(id -u)" != 0 ] || iptables-save 2>/dev/null | sed -n 's/ \[.*//; s/^[-:]/packet rule &/p'
    } | sort
}

files_now() { find /tmp /var/tmp /dev/shm -maxdepth 1 \( -name 'tmq*' -o -name 'trinity*' -o -name 'vllm*' -o -name 'pytest-of-*' \) 2>/dev/null | sed 's/^/file /' | sort; }
