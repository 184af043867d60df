# shellcheck shell=bash disable=SC2154
# The Python environment that units run in: a part of install.sh, whose options and helpers it uses.
UV=uv==0.13.9

# What runs in the environment that is there would find another one's modules under its feet.
refuse_while_running() {
    local units=()
    if [[ -n $root || -n $force ]]; then return; fi
    mapfile -t units < <(systemctl list-units --plain --no-legend --state=active,activating,reloading,deactivating \
        'trimtab-*.service' 2>/dev/null | cut -d' ' -f1)
    ((${#units[@]} == 0)) || fail "$prefix would be replaced under ${units[*]}: first systemctl stop 'trimtab-*' (--force replaces it all the same)"
}

# What of the package and its environment makes an installation another one.
fingerprint() {
    {
        printf '%s\n' "$extras" "$("$python" -c 'import sys; print(sys.version)')"
        if [[ -n $wheel ]]; then
            sha256sum <"$wheel"
        else
            (cd "$source_dir" && find pyproject.toml requirements trimtab services controlplane trimtab_cli -type f \
                ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum)
        fi
        sha256sum <"$constraints"
    } | sha256sum | cut -d' ' -f1
}

# uv of the environment $1, with pip's settings, of which it knows nothing by itself.
as_pip() {
    local venv=$1
    shift
    PYTHONPATH=$source_dir/tools PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -c '
import os, subprocess, sys
from pip_settings import parse_pip_config, uv_environment
said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
os.environ.pop("PYTHONPATH"), os.environ.pop("VIRTUAL_ENV", None)
os.execve(sys.argv[1], sys.argv[1:], uv_environment(parse_pip_config(said), os.environ))
' "$venv/bin/uv" "$@"
}

link_package() {
    local venv=$root$prefix
    [[ -x $link/bin/trimtab-worker ]] || fail "--link-venv $link: there is no bin/trimtab-worker"
    [[ ! -e $venv || -L $venv ]] || fail "$prefix is there already and is no link; uninstall first"
    if [[ $(readlink "$venv" || true) == "$link" ]]; then return; fi
    if [[ -L $venv ]]; then refuse_while_running; fi
    changed "link $prefix to $link"
    act mkdir -p "$(dirname "$venv")"
    act ln -sfn "$link" "$venv"
}

made_here() { [[ -e $1/.trimtab-install || -e $1/.trimtab-installing ]]; }

# An environment with $2 in it at $1, whose scripts are for $prefix.
build() {
    local venv=$1 what=$2 pins=$1/.trimtab-pins
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.trimtab-installing"
    "$python" -m venv --prompt "${prefix##*/}" "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
    # Which build of torch it is, of the same version, is the engine's affair.
    sed -E 's/^(torch==[0-9.]+)[+].*/\1/' "$constraints" >"$pins"
    local command=(pip install --python "$venv/bin/python" --compile-bytecode --constraint "$pins"
        --override "$source_dir/requirements/overrides.txt" "$what$extras")
    # torch's CPU build: where pip's settings name a place that has it, from there, else from PyTorch's own.
    if [[ $engine == cpu ]] && has worker && ! as_pip "$venv" "${command[@]}" --dry-run --quiet 2>/dev/null; then
        command+=(--torch-backend cpu)
    fi
    as_pip "$venv" "${command[@]}" --quiet
    # Scripts name their interpreter by its place, which will be another one.
    grep -lIrFZ "$venv" "$venv/bin" "$venv/pyvenv.cfg" | xargs -0r sed -i "s|$venv|$prefix|g"
    rm -f "$venv/.lock"
}

# Whether every process's modules load in the environment $1.
imports() {
    local modules='import trimtab_cli.__main__'
    if has control; then modules+=', controlplane.__main__'; fi
    if has gateway; then modules+=', services.gateway.__main__'; fi
    if has worker; then modules+=', services.worker.__main__'; fi
    "$1/bin/python" -I -c "$modules"
}

# The environment is built beside the one that is there, and takes its place when it is whole: one that can't be built changes nothing.
install_package() {
    local venv=$root$prefix now what each code
    local new=$venv.new old=$venv.old
    if [[ -n $link ]]; then link_package; return; fi
    [[ ! -L $venv ]] || fail "$prefix is a link (--link-venv); uninstall first"
    for each in '' .new .old; do
        if [[ -d $venv$each && -n $(ls -A "$venv$each") ]] && ! made_here "$venv$each"; then
            fail "$prefix$each is there already and was not made by this script"
        fi
    done
    [[ -z $wheel || -f $wheel ]] || fail "--wheel $wheel: there is no such file"
    "$python" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
        || fail "$python is no Python 3.11 to 3.14 with venv; --python names another"
    if [[ ! -e $venv && -e $old ]]; then
        changed "bring back $prefix, which an earlier run was about to replace"
        act mv "$old" "$venv"
    fi
    now=$(fingerprint)
    if [[ -e $venv/.trimtab-install && $(cat "$venv/.trimtab-install") == "$now" ]]; then
        delete "${prefix#/}.new" "${prefix#/}.old"
        return
    fi
    if made_here "$venv"; then refuse_while_running; fi
    what=${wheel:-$source_dir}
    changed "install ${what##*/}$extras into $prefix"
    if [[ -n $dry ]]; then return; fi
    # A subshell that is no condition: only so does the first failure in it end it.
    set +e
    (set -e; build "$new" "$what")
    code=$?
    set -e
    ((code == 0)) || fail "it could not be built (above); $prefix is as it was"
    printf '%s\n' "$now" >"$new/.trimtab-install"
    rm -f "$new/.trimtab-installing"
    rm -rf "$old"
    if [[ -e $venv ]]; then mv "$venv" "$old"; fi
    mv "$new" "$venv"
    if ! imports "$venv"; then
        rm -rf "$venv"
        if [[ -e $old ]]; then mv "$old" "$venv"; fi
        fail "what was built does not load (above); $prefix is as it was"
    fi
    rm -rf "$old"
}
