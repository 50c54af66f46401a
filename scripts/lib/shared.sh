# shellcheck shell=bash
# The four servers that all tests of a checkout share.
#
# Each comes in one of three ways, in this order: a URL in the environment; a
# container, where a Docker engine answers; a process of this machine, where the
# programs are installed or can be.

: "${here:?}" "${state_dir:?}" "${kinds:?}"

env_file=$state_dir/env

url_variable() {
  case $1 in
    mariadb) printf 'INBOXD_TEST_MYSQL_URL\n' ;;
    *) printf 'INBOXD_TEST_%s_URL\n' "${1^^}" ;;
  esac
}

engine_answers() {
  command -v docker >/dev/null && timeout 10 docker info >/dev/null 2>&1 &&
    docker compose version >/dev/null 2>&1
}

local_possible() {
  can_install || [[ -z $(missing_packages "$1") ]]
}

# Which way a server comes; `engine` is the caller's. A variable that only repeats what we wrote into the
# env file ourselves (somebody sourced it) is not the caller's choice.
way_of() {
  local kind=$1 variable url ours=''
  variable=$(url_variable "$kind")
  url=${!variable:-}
  [[ ! -f $state_dir/$kind.url ]] || ours=$(<"$state_dir/$kind.url")
  if [[ -n $url && $url != "$ours" ]]; then
    printf 'named\n'
  elif [[ -n ${INBOXD_TEST_SERVERS:-} ]]; then
    case $INBOXD_TEST_SERVERS in
      compose | local) printf '%s\n' "$INBOXD_TEST_SERVERS" ;;
      *) die "INBOXD_TEST_SERVERS is $INBOXD_TEST_SERVERS; it can be compose or local." ;;
    esac
  elif [[ $engine == yes ]]; then
    printf 'compose\n'
  elif local_possible "$kind"; then
    printf 'local\n'
  else
    die "no way to a $kind server. There are three:
  1. name one that runs: $variable=…
  2. start a Docker engine (docker info must succeed)
  3. install it here, or run this as root on Debian, which installs it; missing: $(missing_packages "$kind" | sort -u | tr '\n' ' ')"
  fi
}

# Two at once in one checkout would start everything twice.
lock_state() {
  mkdir -p "$state_dir"
  exec 9>"$state_dir/lock"
  flock 9
}

shared_up() {
  local kind way failed=() local_kinds=() compose_kinds=() pids=() names=() i
  local started_at=$SECONDS engine=no
  lock_state
  shared_install_build
  fetch_promtool
  ! engine_answers || engine=yes
  for kind in "${kinds[@]}"; do
    way=$(way_of "$kind")
    printf '%s\n' "$way" >"$state_dir/$kind.way"
    case $way in
      local) local_kinds+=("$kind") ;;
      compose) compose_kinds+=("$kind") ;;
      named) check_named "$kind" || failed+=("$kind") ;;
    esac
  done
  end_deleted_instances
  [[ ${#local_kinds[@]} -eq 0 ]] || install_servers "${local_kinds[@]}"

  for kind in "${local_kinds[@]}"; do
    # Not of the run that happens to call: the next one needs them too.
    (
      INBOXD_TEST_RUN='' start_instance "$kind" "$state_dir/$kind"
      "${kind}_url" "$state_dir/$kind" >"$state_dir/$kind.url"
    ) &
    pids+=($!)
    names+=("$kind")
  done
  if [[ ${#compose_kinds[@]} -gt 0 ]]; then
    compose_up "${compose_kinds[@]}" || failed+=("${compose_kinds[@]}")
  fi
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || failed+=("${names[$i]}")
  done

  write_env
  [[ ${#failed[@]} -eq 0 ]] || die "not up: ${failed[*]}."
  say "up after $((SECONDS - started_at)) s; variables in $env_file"
}

shared_install() {
  shared_install_build
  install_servers "${kinds[@]}"
  fetch_kafka
  fetch_promtool
}

shared_install_build() {
  local packages
  mapfile -t packages < <(missing_build_packages)
  install_packages "${packages[@]}"
}

# `cargo clean` takes the directories away under running servers.
end_deleted_instances() {
  local entry
  for entry in "$registry"/*/; do
    entry=${entry%/}
    [[ -f $entry/state && $(<"$entry/state") == "$state_dir" ]] || continue
    [[ ! -f $(<"$entry/dir")/kind ]] || continue
    kill_entry "$entry"
  done
}

# --- the environment ----------------------------------------------------------

url_of() {
  local kind=$1 variable
  if [[ $(<"$state_dir/$kind.way") == named ]]; then
    variable=$(url_variable "$kind")
    printf '%s\n' "${!variable}"
  elif [[ -f $state_dir/$kind.url ]]; then
    cat "$state_dir/$kind.url"
  fi
}

# Readers of the file are shells and the tests' own small parser: no quotes
# where none are needed.
write_env() {
  local kind url
  for kind in "${kinds[@]}"; do
    url=$(url_of "$kind")
    [[ -n $url ]] || continue
    if [[ $url =~ [^A-Za-z0-9_.:/@%+=,-] ]]; then
      url="'${url//\'/\'\\\'\'}'"
    fi
    printf 'export %s=%s\n' "$(url_variable "$kind")" "$url"
  done >"$env_file.new"
  mv "$env_file.new" "$env_file"
}

shared_env() {
  [[ -f $env_file ]] || die "nothing is up here. Run: scripts/services up"
  cat "$env_file"
}

# --- servers that the caller names --------------------------------------------

# Host and port of a URL, or of the first of several brokers.
address_of() {
  local kind=$1 address=$2 default
  case $kind in
    rabbitmq) default=5672 ;;
    kafka) default=9092 ;;
    postgres) default=5432 ;;
    mariadb) default=3306 ;;
  esac
  address=${address#*://}
  address=${address%%[/?,]*}
  address=${address##*@}
  if [[ $address =~ ^(.*):([0-9]+)$ ]]; then
    printf '%s %s\n' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
  else
    printf '%s %s\n' "$address" "$default"
  fi
}

# An open port is all that can be asked without knowing the server's terms.
check_named() {
  local kind=$1 variable host port
  variable=$(url_variable "$kind")
  read -r host port < <(address_of "$kind" "${!variable}")
  host=${host#[}
  host=${host%]}
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "$port" 2>/dev/null || {
    say "$variable names $host port $port, where nothing answers. Unset it to have a server started."
    return 1
  }
}

# --- containers ---------------------------------------------------------------

compose() {
  local id
  id=$(printf '%s' "$state_dir" | sha256sum)
  # shellcheck disable=SC2046 # assignments without spaces
  env $(cat "$state_dir/compose.ports") \
    docker compose -p "inboxd-test-${id:0:8}" -f "$here/compose.yaml" "$@" 9>&-
}

compose_up() {
  local kind ports
  if [[ ! -f $state_dir/compose.ports ]]; then
    mkdir -p "$state_dir/compose"
    printf 'compose\n' >"$state_dir/compose/kind"
    take_ports "$state_dir/compose" "${#kinds[@]}"
    read -ra ports <"$state_dir/compose/ports"
    for kind in "${kinds[@]}"; do
      printf 'INBOXD_%s_PORT=%s\n' "${kind^^}" "${ports[0]}"
      ports=("${ports[@]:1}")
    done >"$state_dir/compose.ports"
  fi
  compose up -d --wait --wait-timeout "$start_timeout_s" "$@" >&2 || {
    compose logs --tail 30 "$@" >&2
    return 1
  }
  for kind in "$@"; do
    compose_url "$kind" >"$state_dir/$kind.url"
  done
}

compose_url() {
  local kind=$1 port
  port=$(sed -n "s/^INBOXD_${kind^^}_PORT=//p" "$state_dir/compose.ports")
  case $kind in
    rabbitmq) printf 'amqp://guest:guest@127.0.0.1:%s/%%2f\n' "$port" ;;
    kafka) printf '127.0.0.1:%s\n' "$port" ;;
    postgres) printf 'postgres://postgres@127.0.0.1:%s/inboxd\n' "$port" ;;
    mariadb) printf 'mysql://root@127.0.0.1:%s/inboxd\n' "$port" ;;
  esac
}

compose_answers() {
  [[ -n $(compose ps -q --status running "$1" 2>/dev/null) ]]
}

compose_control() {
  local kind=$1
  shift
  case $kind in
    rabbitmq) compose exec -T rabbitmq rabbitmqctl -q "$@" ;;
    kafka) kcat -b "$(compose_url kafka)" "$@" ;;
    postgres) compose exec -T postgres psql -qXAt -U postgres -d inboxd "$@" ;;
    mariadb) compose exec -T mariadb mariadb -u root -D inboxd "$@" ;;
  esac
}

# The server's own tool, on the shared server.
shared_control() {
  local kind=$1 way=none
  shift
  [[ ! -f $state_dir/$kind.way ]] || way=$(<"$state_dir/$kind.way")
  case $way in
    local) "${kind}_control" "$state_dir/$kind" "$@" ;;
    compose) compose_control "$kind" "$@" ;;
    named) die "the shared $kind is named by $(url_variable "$kind"); its tools are not ours to call." ;;
    none) die "the shared $kind is not up. Run: scripts/services up" ;;
  esac
}

# --- status and end -----------------------------------------------------------

shared_status() {
  local kind way answer failed=0
  for kind in "${kinds[@]}"; do
    way=none
    answer=down
    [[ ! -f $state_dir/$kind.way ]] || way=$(<"$state_dir/$kind.way")
    case $way in
      local) ! { main_pid "$state_dir/$kind" >/dev/null && "${kind}_answers" "$state_dir/$kind"; } || answer=up ;;
      compose) ! compose_answers "$kind" || answer=up ;;
      named) ! check_named "$kind" || answer=up ;;
    esac
    [[ $answer == up ]] || failed=1
    printf '%-9s %-8s %-5s %s\n' "$kind" "$way" "$answer" "$([[ $way == none ]] || url_of "$kind")"
  done
  return "$failed"
}

# Ends what was started from this checkout, the own servers of tests included.
# The shared servers' data goes with them, so they need no clean shutdown; ports
# stay reserved, so that the next `up` brings back the same URLs.
shared_down() {
  local entry kind
  lock_state
  for entry in "$registry"/*/; do
    entry=${entry%/}
    [[ -f $entry/state && $(<"$entry/state") == "$state_dir" ]] || continue
    kill_entry "$entry"
  done
  for kind in "${kinds[@]}"; do
    rm -rf "$state_dir/$kind/data" "$state_dir/$kind/initialized"
    rm -f "$state_dir/$kind.way"
  done
  if [[ -f $state_dir/compose.ports ]]; then
    compose down -v >&2 || say "the containers could not be removed."
  fi
  rm -f "$env_file"
}
