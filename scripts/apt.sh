# Sourced by setup.sh and fpga.sh: system packages by apt-get, where that is allowed. `script` is the name
# in front of each line.

# Without a network apt-get must end soon.
patience=(-o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1)

say() { printf '%s: %s\n' "$script" "$*"; }

fail() {
  printf '%s: %s\n' "$script" "$*" >&2
  exit 1
}

# apt-get changes the machine, and sudo is asked for nothing that nobody asked for.
may_use_apt() {
  command -v apt-get >/dev/null || return 1
  case "${SSDKV_APT:-}" in
    0) return 1 ;;
    1) return 0 ;;
    '') [ "$(id -u)" -eq 0 ] ;;
    *) fail "SSDKV_APT=$SSDKV_APT: 1 lets this script install system packages, 0 forbids it" ;;
  esac
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

refresh_packages() {
  as_root apt-get "${patience[@]}" update -q </dev/null
}

install_packages() {
  may_use_apt || return 1
  if [ "$(id -u)" -eq 0 ]; then
    say "installing system packages with apt-get: $*"
  else
    say "installing system packages with sudo apt-get, as SSDKV_APT=1 asks: $*"
  fi
  (
    # apt-get does not wait for another one, and both scripts may run at once.
    flock 9
    refresh_packages &&
      as_root env DEBIAN_FRONTEND=noninteractive apt-get "${patience[@]}" install -y -q \
        --no-install-recommends "$@" </dev/null
  ) 9<scripts/apt.sh
}
