# Root folders with a Debian system, made by debootstrap. For scripts that define `say` and `cannot REASON`, which exits.
# shellcheck shell=bash

# "SITE SUITE COMPONENT" of each Debian repository that apt uses here, which may be a mirror; nothing where apt knows none.
# $(...) are apt's own placeholders.
debian_repositories() {
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Origin: Debian' 'Created-By: Packages' 2>/dev/null || true
}

# Where apt gets the main archive of this machine's Debian from; nothing where that is not known.
debian_mirror() {
    local codename
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    debian_repositories | awk -v suite="$codename" '$2 == suite && $3 == "main" { print $1; exit }'
}

install_debootstrap() {
    ! command -v debootstrap >/dev/null || return 0
    command -v apt-get >/dev/null || cannot "neither debootstrap nor apt-get is here: install debootstrap"
    say "installing debootstrap"
    # RUNLEVEL=1: the packages' own services are not started
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    apt-get update -qq >&2 || cannot "apt-get update failed: is the network there?"
    apt-get install -y -qq --no-install-recommends debootstrap >/dev/null || cannot "apt-get install debootstrap failed"
}

# Sets the array debootstrap_command: what makes the system in ROOT, in namespaces that end what it mounts and starts.
#   prepare_debootstrap SUITE PACKAGE,PACKAGE ROOT CACHE_FOLDER
prepare_debootstrap() {
    local suite=$1 packages=$2 root=$3 cache=$4 proxy=
    install_debootstrap
    mkdir -p "$cache"
    eval "$(apt-config shell proxy Acquire::http::Proxy 2>/dev/null || true)"
    # shellcheck disable=SC2034
    debootstrap_command=(
        env "http_proxy=${proxy:-${http_proxy:-}}"
        unshare --mount --propagation private --pid --fork --kill-child
        debootstrap --variant=minbase --cache-dir="$cache" --include="$packages" "$suite" "$root" "$(debian_mirror)"
    )
}
