# shellcheck shell=bash
# Installs what is missing: Debian packages as root, Kafka's jars from Maven
# Central. Kafka is not in Debian.

: "${here:?}" "${state_dir:?}"

kafka_version=4.4.0
kafka_home=${XDG_CACHE_HOME:-$HOME/.cache}/inboxd-test/kafka-$kafka_version
prometheus_home=${XDG_CACHE_HOME:-$HOME/.cache}/inboxd-test/prometheus

# What the build needs on a bare Debian: a C and C++ compiler, make and bash for
# librdkafka's configure, OpenSSL and zlib to link it with.
build_packages=(gcc g++ make libc6-dev pkg-config libssl-dev zlib1g-dev perl ca-certificates git)

can_install() {
  [[ $EUID -eq 0 && -f /etc/debian_version ]] && command -v apt-get >/dev/null
}

is_installed() {
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Debian's package for each command of a server that is not there.
missing_packages() {
  local kind
  for kind in "$@"; do
    "${kind}_missing_packages"
  done
}

missing_build_packages() {
  local package
  can_install || return 0
  for package in "${build_packages[@]}"; do
    is_installed "$package" || printf '%s\n' "$package"
  done
}

# Installs the packages of the given kinds of servers, or says what is missing.
install_servers() {
  local packages
  mapfile -t packages < <(missing_packages "$@" | sort -u)
  install_packages "${packages[@]}"
}

# What no package has. Apart from the packages, so that it runs beside the start
# of the other servers, and that without it those come up all the same.
fetch_programs() {
  [[ $1 != kafka ]] || fetch_kafka
}

# promtool judges /metrics and the example alerts. Its package would bring a
# daemon too: only the program is taken out of it. Without it those tests fail
# and say so; everything else runs.
fetch_promtool() (
  [[ ! -x $prometheus_home/usr/bin/promtool ]] || return 0
  ! command -v promtool >/dev/null || return 0
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    say "promtool is missing and cannot be fetched here: install Prometheus' promtool, or its tests fail"
    return 0
  }
  local cache work
  cache=$(dirname "$prometheus_home")
  mkdir -p "$cache"
  exec 8>"$cache/lock"
  flock 8
  [[ ! -x $prometheus_home/usr/bin/promtool ]] || return 0
  say "fetching promtool from Debian's package prometheus"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  if [[ -z $(apt-cache policy prometheus 2>/dev/null) ]] && can_install; then
    apt-get update -qq </dev/null >"$work/log" 2>&1 8>&- || true
  fi
  (cd "$work" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb prometheus) \
    </dev/null >>"$work/log" 2>&1 8>&- || {
    say "promtool could not be fetched; its tests will fail. apt-get said:"
    tail -n 5 "$work/log" | sed 's/^/    /' >&2
    return 0
  }
  rm -rf "$prometheus_home"
  mv "$work/prometheus" "$prometheus_home"
)

install_packages() {
  [[ $# -gt 0 ]] || return 0
  can_install || die "missing here: $*. Install them (the names are Debian's), or run as root on Debian."
  apt_install "$@"
}

# Packages of servers start them when they are installed. A policy-rc.d that
# says no prevents that; whatever was there before comes back.
apt_install() (
  local policy=/usr/sbin/policy-rc.d log
  mkdir -p "$state_dir"
  log=$state_dir/apt.log
  exec 8>/run/inboxd-test-apt.lock
  flock 8
  restore_policy() {
    rm -f "$policy"
    [[ ! -e $policy.inboxd-saved ]] || mv "$policy.inboxd-saved" "$policy"
  }
  trap restore_policy EXIT
  [[ -e $policy.inboxd-saved || ! -e $policy ]] || mv "$policy" "$policy.inboxd-saved"
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"

  say "installing: $*"
  export DEBIAN_FRONTEND=noninteractive
  # An unreachable source of somebody else's must not stop us.
  apt-get update -qq </dev/null >"$log" 2>&1 8>&- || say "apt-get update failed; trying with the lists that are there"
  apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=600 "$@" </dev/null >>"$log" 2>&1 8>&- || {
    say "apt-get install failed. The end of $log:"
    tail -n 30 "$log" | sed 's/^/    /' >&2
    exit 1
  }
)

# Downloads aside and moves into place, so that an interrupted download is never
# taken for a whole one; the lock is for two checkouts at once.
fetch_kafka() (
  [[ ! -d $kafka_home/libs ]] || return 0
  local cache work
  cache=$(dirname "$kafka_home")
  mkdir -p "$cache"
  exec 8>"$cache/lock"
  flock 8
  [[ ! -d $kafka_home/libs ]] || return 0
  say "fetching Apache Kafka $kafka_version from Maven Central"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  kafka_pom >"$work/pom.xml"
  (cd "$work" && mvn -B -q dependency:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory=libs) </dev/null >"$work/log" 2>&1 8>&- || {
    say "Maven could not fetch Kafka:"
    tail -n 30 "$work/log" | sed 's/^/    /' >&2
    exit 1
  }
  rm -rf "$kafka_home"
  mkdir "$work/kafka"
  mv "$work/libs" "$work/kafka/libs"
  mv "$work/kafka" "$kafka_home"
)

# The broker alone comes without a logging back end and would fail in silence.
kafka_pom() {
  cat <<POM
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>inboxd.test</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>$kafka_version</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.25.5</version>
    </dependency>
  </dependencies>
</project>
POM
}
