#!/usr/bin/env bash
# Installs Trimtab on a machine with systemd, and takes it off again. `install.sh --help` says how.
#
# What is under /etc is the administrator's: it is written where it is missing, and never again. Everything else is this script's, and is
# brought to what it should be; where it is that already, nothing is touched. Nothing is started: the last lines say how.
set -euo pipefail
# The user trimtab must be able to read and run what is installed, whatever the administrator's own files get.
umask 022
# The last of a pipeline runs in this shell, so that what it changes is counted.
shopt -s lastpipe

usage() {
    cat <<'HELP'
usage: install.sh [options]                    install, or bring up to date
       install.sh --uninstall [--purge]        take off; --purge: settings, state, models and the user too

  --role R          control, gateway, worker or all; repeat it [default: all]
  --gpus N          GPUs of this machine, each with a worker [default: what nvidia-smi lists]; with 0 one worker on the CPU
  --numa "A B ..."  NUMA node of each GPU [default: as the kernel says]
  --address ADDR    where the processes listen, as other machines reach this one [default: 127.0.0.1]
  --name NAME       this machine's name in the mesh: its nodes are NAME-w0, NAME-g0 [default: w0, g0]
  --scale           also follow how many workers the pool wants (trimtab-scale)
  --tls             take certificates from /etc/trimtab/tls (docs/install-bare-metal.md)
  --tls-credentials likewise, as systemd's copies, one unit's for that unit alone; renewed ones hold from its next start
  --wheel FILE      the package to install
  --from-source     the package is this checkout [default]
  --link-venv DIR   use this virtual environment, with Trimtab in it, instead of making one
  --engine E        gpu, cpu or none: what workers run on [default: gpu where there are GPUs, else cpu]
  --python P        interpreter for the environment, 3.11 to 3.14 [default: python3]
  --prefix DIR      the environment [default: where it is installed already, else /opt/trimtab]
  --root DIR        everything below DIR, such as an image of a machine; nothing of this one is touched
  --force           replace the environment though units run in it
  --dry-run         say what would be done
HELP
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_dir=$(cd "$here/../.." && pwd)
root='' prefix='' wheel='' link='' python=python3 engine='' gpus='' numa='' dry='' uninstall='' purge='' tls='' scale='' force=''
address=127.0.0.1 name=''
roles=()
changes=0
UNITS=usr/local/lib/systemd/system
ALL_UNITS=(trimtab.target trimtab-control.service trimtab-gateway.service trimtab-worker@.service trimtab-gpu.service trimtab-scale.service)

say() { printf '%s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 2; }
changed() { changes=$((changes + 1)); say "${dry:+would: }$*"; }

# Does it, or with --dry-run doesn't.
act() { if [[ -z $dry ]]; then "$@"; fi; }

while (($#)); do
    case $1 in
        --role | --address | --name | --gpus | --numa | --wheel | --link-venv | --engine | --python | --prefix | --root)
            (($# > 1)) || fail "$1 needs a value" ;;&
        --role) roles+=("$2"); shift ;;
        --address) address=$2; shift ;;
        --name) name=$2; shift ;;
        --gpus) gpus=$2; shift ;;
        --numa) numa=$2; shift ;;
        --wheel) wheel=$2; shift ;;
        --link-venv) link=$2; shift ;;
        --engine) engine=$2; shift ;;
        --python) python=$2; shift ;;
        --prefix) prefix=${2%/}; shift ;;
        --root) root=${2%/}; shift ;;
        --from-source) wheel='' ;;
        --scale) scale=yes ;;
        --tls) tls=tls ;;
        --tls-credentials) tls='tls-credentials' ;;
        --force) force=yes ;;
        --dry-run) dry=yes ;;
        --uninstall) uninstall=yes ;;
        --purge) purge=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "no such option: $1" ;;
    esac
    shift
done
[[ ${#roles[@]} -gt 0 ]] || roles=(all)
for role in "${roles[@]}"; do
    [[ $role =~ ^(control|gateway|worker|all)$ ]] || fail "--role must be control, gateway, worker or all, not '$role'"
done
if [[ -z $prefix ]]; then
    prefix=$(sed -nE 's#^ExecStart=(/[A-Za-z0-9._/-]+)/bin/trimtab(-[a-z]+)? .*#\1#p' "$root/$UNITS"/trimtab-*.service 2>/dev/null | head -n 1) || true
    prefix=${prefix:-/opt/trimtab}
fi
[[ $prefix == /?* && $prefix =~ ^[A-Za-z0-9._/-]+$ ]] || fail "--prefix must be an absolute path of plain characters, not '$prefix'"
[[ -z $root || $root == /* ]] || fail "--root must be an absolute path, not '$root'"
[[ -z $gpus || $gpus =~ ^(0|[1-9][0-9]?)$ ]] || fail "--gpus must be a number up to 99, not '$gpus'"
[[ $engine =~ ^(gpu|cpu|none|)$ ]] || fail "--engine must be gpu, cpu or none, not '$engine'"
[[ $address =~ ^([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])$ && $address != 0.0.0.0 ]] \
    || fail "--address must be one that other machines reach, such as 10.0.0.5 or [fd00::5], not '$address'"
[[ $name =~ ^([A-Za-z0-9][A-Za-z0-9._-]{0,40})?$ ]] || fail "--name must be letters, digits, dots, dashes or underscores, not '$name'"
[[ -z $purge || -n $uninstall ]] || fail "--purge goes with --uninstall"
[[ -n $root || -n $dry || $EUID -eq 0 ]] || fail "this machine's own installation needs root; --root DIR and --dry-run do not"

name=${name:+$name-}
has() { [[ " ${roles[*]} " == *" $1 "* || " ${roles[*]} " == *" all "* ]]; }

# shellcheck source=deploy/bare-metal/environment.sh
source "$here/environment.sh"

# stdin becomes the file $1 (below the root) with mode $2, if it differs. Files under /etc that exist are left as they are, unless they are what
# the file $3 has: then they are still as this script wrote them.
put() {
    local to=$root/$1 mode=$2 before=${3:-} now
    now=$(mktemp)
    cat >"$now"
    if [[ $1 == etc/* && -e $to ]] && { [[ -z $before ]] || ! cmp -s "$before" "$to"; }; then
        cmp -s "$now" "$to" || say "kept: /$1 (yours)"
    elif ! cmp -s "$now" "$to"; then
        changed "write /$1"
        act mkdir -p "$(dirname "$to")"
        act install -m "$mode" "$now" "$to"
    fi
    rm -f "$now"
}

# The unit $1 as it is for this prefix.
put_unit() { sed "s#/opt/trimtab/#$prefix/#g" "$source_dir/deploy/systemd/$1" | put "$UNITS/$1" 0644; }

delete() {
    local path full
    for path in "$@"; do
        full=$root/$path
        if [[ -n $path && (-e $full || -L $full) ]]; then
            changed "remove /$path"
            act rm -rf -- "$full"
        fi
    done
}

systemctl_() { if [[ -n $root ]]; then systemctl --root="$root" "$@"; else systemctl "$@"; fi; }

enable() {
    if [[ $(systemctl_ is-enabled "$1" 2>/dev/null || true) != enabled ]]; then
        changed "enable $1"
        act systemctl_ enable --quiet "$1"
    fi
}

# Whether a unit of this name comes from this script.
ours() {
    local unit
    for unit in "${ALL_UNITS[@]}"; do
        if [[ $1 == "$unit" || ($unit == *@.service && $1 == "${unit%.service}"*.service) ]]; then return 0; fi
    done
    return 1
}

# Units that are enabled and that nobody asks for any more: of GPUs that are gone, or of another role.
disable_others() {
    local link unit
    for link in "$root"/etc/systemd/system/*.wants/trimtab-*.service; do
        unit=${link##*/}
        # An administrator's own trimtab-something is his.
        if [[ -L $link && " $* " != *" $unit "* ]] && ours "$unit"; then
            changed "disable $unit, which was not asked for (it runs on where it does: systemctl stop $unit)"
            act systemctl_ disable --quiet "$unit"
        fi
    done
}

# The bus addresses of this machine's GPUs, in nvidia-smi's order, one a line.
gpu_buses() {
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null | grep -E '^[0-9A-Fa-f]+:[0-9A-Fa-f]+:' || true
    fi
}

# The NUMA node of the GPU at bus address $1 (00000000:17:00.0): as the kernel says; nothing where it knows none.
numa_of() {
    local bus=${1,,} node
    node=$(cat "${TRIMTAB_SYSFS:-/sys}/bus/pci/devices/${bus: -12}/numa_node" 2>/dev/null || true)
    if [[ $node =~ ^[0-9]+$ ]]; then printf '%s\n' "$node"; fi
}

make_user() {
    local private=''
    put usr/local/lib/sysusers.d/trimtab.conf 0644 <"$source_dir/deploy/systemd/sysusers.conf"
    # Where systemd hands out copies of the certificates, root alone reads them.
    if [[ $tls == tls-credentials ]] || grep -qs '^LoadCredential=' "$root"/etc/systemd/system/trimtab-*.service.d/*.conf; then
        private='/tls/ s/0640 root trimtab/0600 root root/; /tls / s/0750 root trimtab/0700 root root/'
    fi
    sed "$private" "$source_dir/deploy/systemd/tmpfiles.conf" | put usr/local/lib/tmpfiles.d/trimtab.conf 0644
    if [[ $EUID -ne 0 ]]; then
        say "not root: the user and the owners of files are left to the first boot (systemd-sysusers, systemd-tmpfiles)"
        return
    fi
    if ! grep -qs '^trimtab:' "$root/etc/passwd"; then
        changed "make the user trimtab"
        act systemd-sysusers ${root:+"--root=$root"} "$root/usr/local/lib/sysusers.d/trimtab.conf"
    fi
    act systemd-tmpfiles ${root:+"--root=$root"} --create "$root/usr/local/lib/tmpfiles.d/trimtab.conf"
}

put_config() {
    local dir=$source_dir/deploy/bare-metal there=''
    if has control && [[ $address != 127.0.0.1 ]]; then there=$address:7071; fi
    sed "${there:+s/^#control = .*/control = [\"$there\"]/}" "$dir/trimtab.toml" | put etc/trimtab/trimtab.toml 0640
    if has control; then put_env control "$(beyond "TRIMTAB_CONTROL_LISTEN=$address:7071")"; fi
    if has gateway; then
        put_env gateway "${name:+TRIMTAB_GATEWAY_NODE_ID=${name}g0}" \
            "$(beyond "TRIMTAB_GATEWAY_LISTEN=$address:7070")" "$(beyond "TRIMTAB_GATEWAY_HTTP=$address:7080")"
    fi
    if [[ -n $scale ]]; then put_env scale "${there:+TRIMTAB_CONTROL=$there}" "${name:+NODE_ID=${name}w{n\}}" "$( ((gpus == 0)) || echo "MOST=$gpus")"; fi
    if has worker; then
        put etc/trimtab/worker.env 0640 <"$dir/worker.env"
        for ((i = 0; i < workers; i++)); do put_worker "$i"; done
    fi
    if [[ -z $tls ]]; then return; fi
    # Where certificates were taken the other way before, and nobody has touched that since.
    local before other=tls
    if [[ $tls == tls ]]; then other='tls-credentials'; fi
    before=$(mktemp)
    for role in control gateway worker; do
        if has "$role"; then
            sed "s#/tls/$role-#&$name#" "$dir/$other/$role.conf" >"$before"
            sed "s#/tls/$role-#&$name#" "$dir/$tls/$role.conf" \
                | put "etc/systemd/system/trimtab-$role${at[$role]}.service.d/20-tls.conf" 0644 "$before"
        fi
    done
    rm -f "$before"
}

# $1, where this machine's address is one for others too.
beyond() { if [[ $address != 127.0.0.1 ]]; then printf '%s\n' "$1"; fi; }

# The file of unit $1's variables, and the lines that this machine needs besides.
put_env() {
    { cat "$source_dir/deploy/bare-metal/$1.env"; printf '%s\n' "${@:2}" | sed '/^$/d'; } | put "etc/trimtab/$1.env" 0640
}

# Worker $1's own variables, and the CPUs and the memory that are nearest to its GPU.
put_worker() {
    local i=$1
    put "etc/trimtab/worker-$i.env" 0640 <<ENV
# What worker $i has over worker.env, its unit and trimtab.toml. Where other machines have workers in the same mesh, names must differ, and the
# address is one that gateways reach, which needs TLS.
$([[ -n $name ]] || echo '#')TRIMTAB_WORKER_NODE_ID=${name}w$i
TRIMTAB_WORKER_LISTEN=$address:$((7100 + i))
TRIMTAB_WORKER_METRICS=127.0.0.1:$((7200 + i))
ENV
    if [[ -z ${nodes[i]:-} ]]; then return; fi
    put "etc/systemd/system/trimtab-worker@$i.service.d/10-numa.conf" 0644 <<UNIT
# GPU $i is nearest to NUMA node ${nodes[i]}: this worker's threads and memory stay there.
[Service]
NUMAPolicy=bind
NUMAMask=${nodes[i]}
CPUAffinity=numa
UNIT
}

put_units() {
    put_unit trimtab.target
    enable_these=(trimtab.target)
    for role in control gateway worker; do
        if has "$role"; then put_unit "trimtab-$role${at[$role]}.service"; fi
    done
    if has control; then enable_these+=(trimtab-control.service); fi
    if has gateway; then enable_these+=(trimtab-gateway.service); fi
    if has worker; then put_unit trimtab-gpu.service; fi
    if has worker; then for ((i = 0; i < workers; i++)); do enable_these+=("trimtab-worker@$i.service"); done; fi
    if [[ -n $scale ]]; then
        put_unit trimtab-scale.service
        enable_these+=(trimtab-scale.service)
    fi
    put usr/local/share/doc/trimtab/install-bare-metal.md 0644 <"$source_dir/docs/install-bare-metal.md"
    if [[ -z $root && -z $dry ]]; then systemctl daemon-reload; fi
    for unit in "${enable_these[@]}"; do enable "$unit"; done
    disable_others "${enable_these[@]}"
}

take_off() {
    local unit each enabled=()
    if [[ -z $root && -z $dry ]]; then systemctl stop "${ALL_UNITS[@]/@/@*}" 2>/dev/null || true; fi
    for unit in "$root"/etc/systemd/system/*.target.wants/trimtab{.target,-*.service}; do
        if [[ -L $unit ]] && ours "${unit##*/}"; then enabled+=("${unit#"$root"/}"); fi
    done
    delete ${enabled[@]+"${enabled[@]}"} "${ALL_UNITS[@]/#/$UNITS/}"
    delete usr/local/lib/sysusers.d/trimtab.conf usr/local/lib/tmpfiles.d/trimtab.conf usr/local/share/doc/trimtab
    for each in '' .new .old; do
        if [[ -L $root$prefix$each ]] || made_here "$root$prefix$each"; then
            delete "${prefix#/}$each"
        elif [[ -e $root$prefix$each ]]; then
            say "kept: $prefix$each (not made by this script)"
        fi
    done
    if [[ -n $purge ]]; then
        for unit in "$root"/etc/systemd/system/trimtab-*.service.d; do
            if [[ -d $unit ]]; then delete "${unit#"$root"/}"; fi
        done
        delete etc/trimtab var/lib/trimtab var/lib/trimtab-scale var/cache/trimtab
        if [[ -z $root ]] && getent passwd trimtab >/dev/null; then
            changed "remove the user trimtab"
            act userdel trimtab
        fi
    fi
    if [[ -z $root && -z $dry ]]; then systemctl daemon-reload; fi
}

if [[ -n $uninstall ]]; then
    take_off
    say "${dry:+would be }taken off: $changes changes"
    exit 0
fi

[[ -z $scale ]] || has worker || fail "--scale is for a machine with workers (--role worker)"
declare -A at=([control]='' [gateway]='' [worker]=@)
mapfile -t buses < <(gpu_buses)
gpus=${gpus:-${#buses[@]}}
workers=$((gpus > 0 ? gpus : 1))
nodes=()
if [[ -n $numa ]]; then
    read -ra nodes <<<"$numa"
    [[ ${#nodes[@]} -eq $gpus && $numa =~ ^[0-9\ ]+$ ]] || fail "--numa needs a NUMA node for each of $gpus GPUs, not '$numa'"
else
    for ((i = 0; i < gpus; i++)); do nodes+=("$(numa_of "${buses[i]:-}")"); done
fi
engine=${engine:-$( ((gpus > 0)) && echo gpu || echo cpu)}
constraints=$source_dir/requirements/constraints$([[ $engine == gpu ]] && echo -gpu || true).txt
extras=''
if has worker; then extras="[vllm-door$([[ $engine == none ]] || echo ",$engine")]"; fi

# Units run it as the user trimtab, and see no home directory, where an interpreter may lie.
check_package() {
    local real
    if [[ -n $root || -n $dry ]]; then return; fi
    real=$(readlink -f "$prefix/bin/python")
    if [[ $real == /home/* || $real == /root/* ]] || ! runuser -u trimtab -- "$prefix/bin/python" -c '' 2>/dev/null; then
        fail "the units can't run $real; take an interpreter that everybody can, outside of home directories (--python)"
    fi
}

install_package
put_config
put_units
make_user
check_package
if ((changes == 0)); then
    say "nothing to do: it is installed as it should be"
    exit 0
fi
say "${dry:+would be }installed: $changes changes"
say "next: edit /etc/trimtab/trimtab.toml; check each unit's settings (\"Check\" in /usr/local/share/doc/trimtab/install-bare-metal.md); then systemctl start trimtab.target"
