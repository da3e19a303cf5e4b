# Shared by demo and test: a virtual environment with the pinned dependencies, and a broker to run on.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
. scripts/_failures.sh

say() { printf '\n== %s\n' "$*"; }

give_up() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# RUNLEVEL=1: the packages' own services are not started; every run starts a broker of its own
apt_install() {
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get update -qq || give_up "apt-get update failed: is the network there?"
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null || give_up "apt-get install $* failed"
}

# Sets python, a recent one.
find_python() {
    python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        { [ -z "${PYTHON:-}" ] && may_install; } || give_up "$python is not there: install Python 3.11 or newer, or set PYTHON to it"
        say python3
        apt_install python3 python3-venv
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        give_up "$("$python" --version 2>&1) is too old: install Python 3.11 or newer, or set PYTHON to it"
}

# A virtual environment in $venv, of the Python that find_python has found.
make_venv() {
    local said
    rm -rf "$venv"
    said=$("$python" -m venv "$venv" 2>&1) && return
    # Debian's Python comes without the module that puts pip into an environment
    may_install || give_up "$python -m venv failed, install python3-venv: ${said##*$'\n'}"
    apt_install python3-venv
    said=$("$python" -m venv "$venv" 2>&1) || give_up "$python -m venv failed: ${said##*$'\n'}"
}

# How many packages the files after -c and -r pin.
pinned() {
    local word before=
    for word in "$@"; do
        case $before in -c | -r) grep == "$word" ;; esac
        before=$word
    done | cut -d= -f1 | sort -u | wc -l
}

# What pip is doing, from its output and its arguments: rewritten in place on a terminal, else a line for each large step and every 15 s.
pip_progress() {
    local every=15 began=$SECONDS shown=$SECONDS count=0 total at_most= line now="begins" status
    [ ! -t 1 ] || every=1
    total=$(pinned "$@")
    [ "$total" = 0 ] || at_most=" of at most $total"
    while :; do
        status=0
        IFS= read -r -t "$every" line || status=$?
        [ "$status" = 0 ] || [ "$status" -gt 128 ] || break # the end; above 128: nothing new
        if [ "$status" = 0 ]; then
            case $line in
                Collecting\ *)
                    count=$((count + 1)) line=${line#Collecting }
                    now="package $count$at_most: ${line%%[!A-Za-z0-9._-]*}"
                    ;;
                *Downloading\ *MB*) now="downloads ${line##*Downloading }" shown=-$every ;;
                "Installing collected packages"*) now="installs $count packages" shown=-$every ;;
            esac
        fi
        [ $((SECONDS - shown)) -ge "$every" ] || continue
        shown=$SECONDS
        if [ -t 1 ]; then
            printf '\r\033[K%s s: %.70s' $((SECONDS - began)) "$now"
        else
            printf '%s s: %s\n' $((SECONDS - began)) "$now"
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

# Installs into $venv and shows progress. Warnings are left out.
pip_install() {
    local errors=$venv/.pip-errors
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@" 2>"$errors" | pip_progress "$@" && return
    grep -v '^WARNING' "$errors" >&2
    return 1
}

# A virtual environment with what a user needs, or, with an EXTRA of pyproject.toml, with that too.
#   make_environment [EXTRA]
make_environment() {
    local extra=${1:-} python stamp wanted
    stamp=$venv/.installed${extra:+-$extra}
    find_python
    # an environment knows its own path: one that was moved is made again
    if cat "$venv"/.installed* 2>/dev/null | cut -d' ' -f2- | grep -qvxF "$PWD"; then rm -rf "$venv"; fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "virtual environment in .venv"
        make_venv
    fi
    wanted="$(cat pyproject.toml constraints-cpu.txt | sha256sum | cut -d' ' -f1) $PWD"
    # the tools of development include all that a user needs
    if ! grep -qsxF "$wanted" "$stamp" "$venv/.installed-dev"; then
        say "dependencies${extra:+ of $extra}, as pinned in constraints-cpu.txt (minutes, once)"
        pip_install -c constraints-cpu.txt -e ".${extra:+[$extra]}" ||
            give_up "pip could not install what constraints-cpu.txt pins: is the network there, and the package index?"
        echo "$wanted" >"$stamp"
    fi
}

has_broker() {
    [ -n "${TRINITY_MQ_BROKER_URL:-}" ] || command -v rabbitmq-server >/dev/null ||
        ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1 ||
        docker info >/dev/null 2>&1
}

make_broker() {
    has_broker && return
    may_install || give_up "no broker: install RabbitMQ (rabbitmq-server), or start Docker, or set TRINITY_MQ_BROKER_URL"
    say "rabbitmq-server"
    apt_install rabbitmq-server
}

# The package of generated tasks: one of those that it needs is built from C. Without it its tests are skipped.
make_reasoning_gym() {
    "$venv/bin/python" -c 'import reasoning_gym' 2>/dev/null && return
    if command -v cc >/dev/null; then
        say "reasoning-gym"
        pip_install -c constraints-cpu.txt -e '.[reasoning-gym]' && return
    fi
    say "not there: reasoning-gym, which needs a C compiler; tests that need it are skipped"
}

# A browser for the tests of the page of a run, for --all; without it those tests are skipped.
make_browser() {
    if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
        if may_install; then
            say "chromium"
            (apt_install chromium) || say "not there: chromium; the tests of the page in a browser are skipped"
        else
            say "not there: chromium; the tests of the page in a browser are skipped"
        fi
    fi
    "$venv/bin/python" -c 'import playwright' 2>/dev/null ||
        pip_install -c constraints-cpu.txt -e '.[browser]' || say "not there: playwright"
}

# What builds and audits a release, for --all; without it those tests are skipped.
make_supply() {
    "$venv/bin/python" -c 'import build, cyclonedx_py, pip_audit, safety_db' 2>/dev/null ||
        pip_install -c constraints-cpu.txt -e '.[supply]' || say "not there: the extra supply"
}

# What the tests of clients in other languages (schemas/clients), of PostgreSQL and of Prometheus need; without it those tests are skipped.
make_clients() {
    local go_sources=/usr/share/gocode/src/github.com wanted=()
    command -v go >/dev/null || wanted+=(golang-go)
    [ -d $go_sources/klauspost/compress ] || wanted+=(golang-github-klauspost-compress-dev)
    [ -d $go_sources/rabbitmq/amqp091-go ] || wanted+=(golang-github-rabbitmq-amqp091-go-dev)
    [ -d $go_sources/vmihailenco/msgpack/v5 ] || wanted+=(golang-github-vmihailenco-msgpack.v5-dev)
    { command -v node && command -v npm; } >/dev/null || wanted+=(nodejs npm)
    command -v promtool >/dev/null || wanted+=(prometheus)
    { command -v initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb'; } >/dev/null || wanted+=(postgresql)
    make_reasoning_gym
    [ ${#wanted[@]} != 0 ] || return 0
    if may_install; then
        say "tools of the tests of clients and databases: ${wanted[*]}"
        # a subshell: what cannot be installed is no reason to give up the other tests
        (apt_install "${wanted[@]}") && return
    fi
    say "not there: ${wanted[*]}; tests that need them are skipped"
}
