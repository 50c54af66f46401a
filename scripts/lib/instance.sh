# shellcheck shell=bash
# Instances: one server process in one directory, and the registry of them.
#
# DIR/kind ports server.conf log data/ belong to the instance and outlive its
# process. The registry, one directory per instance under /tmp, holds what must
# outlive DIR: process ids, ports, who started it. It is also what keeps two
# checkouts, or two tests, from taking the same port.
#
# A process is named by its id *and* its start time: an id alone may be
# somebody else's by the time we signal it.

: "${state_dir:?}" "${start_timeout_s:?}" "${kinds:?}"

registry=/tmp/inboxd-test-$UID

say() { printf 'services: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

is_kind() {
  local kind
  for kind in "${kinds[@]}"; do
    [[ $kind != "$1" ]] || return 0
  done
  return 1
}

# --- registry -----------------------------------------------------------------

# The registry's entry of an instance, made if need be.
entry_of() {
  local id entry
  id=$(printf '%s' "$1" | sha256sum)
  entry=$registry/${id:0:16}
  if [[ ! -d $entry ]]; then
    mkdir -p -m 700 "$registry"
    [[ -O $registry ]] || die "$registry belongs to somebody else."
    mkdir -p "$entry"
    printf '%s\n' "$1" >"$entry/dir"
  fi
  printf '%s\n' "$entry"
}

# Entries of which nothing is left: no directory, no process.
forget_stale_entries() {
  local entry
  for entry in "$registry"/*/; do
    entry=${entry%/}
    [[ -f $entry/dir ]] || continue
    [[ ! -f $(<"$entry/dir")/kind ]] || continue
    [[ -z $(live_pids "$entry") ]] || continue
    rm -rf "$entry"
  done
}

# --- processes ----------------------------------------------------------------

# Reads /proc/PID/stat from its third field on into the caller's `fields`. Not
# with $(<…): bash exits when the process ends between open and read.
read_stat() {
  local stat=''
  { IFS= read -r -d '' stat <"/proc/$1/stat"; } 2>/dev/null || true
  # The name, in parentheses, may contain anything.
  read -ra fields <<<"${stat##*) }"
  [[ ${#fields[@]} -ge 20 ]]
}

# When a process started, in clock ticks since boot; fails for the dead. A zombie
# is dead (nobody may be there to collect it) once its last thread is.
start_time() {
  local fields
  read_stat "$1" || return 1
  [[ ${fields[0]} != Z || ${fields[17]} -gt 1 ]] || return 1
  printf '%s\n' "${fields[19]}"
}

# The recorded processes of an entry that are still the same and alive.
live_pids() {
  local pid started
  [[ -f $1/pids ]] || return 0
  while read -r pid started; do
    if [[ $(start_time "$pid") == "$started" ]]; then
      printf '%s\n' "$pid"
    fi
  done <"$1/pids"
}

record_pid() {
  local dir=$1 pid=$2 started
  started=$(start_time "$pid") || return 0 # dead already: the caller will see
  printf '%s %s\n' "$pid" "$started" >>"$(entry_of "$dir")/pids"
}

# The server itself: the process recorded first.
main_pid() {
  local entry pid started
  entry=$(entry_of "$1")
  [[ -s $entry/pids ]] || return 1
  read -r pid started <"$entry/pids"
  [[ $(start_time "$pid") == "$started" ]] || return 1
  printf '%s\n' "$pid"
}

# A process and all below it. Sessions and groups do not do: each PostgreSQL
# backend leads its own.
tree() {
  local -A children=()
  local pid fields queue=("$1")
  for pid in /proc/[0-9]*; do
    pid=${pid#/proc/}
    read_stat "$pid" || continue
    children[${fields[1]}]+=" $pid"
  done
  while [[ ${#queue[@]} -gt 0 ]]; do
    pid=${queue[0]}
    printf '%s\n' "$pid"
    read -ra fields <<<"${children[$pid]:-}"
    queue=("${queue[@]:1}" "${fields[@]}")
  done
}

# Stops a process and all below it, parents first so that nothing is forked
# behind our back; prints what was stopped.
freeze_tree() {
  local seen='' now
  while now=$(tree "$1") && [[ $now != "$seen" ]]; do
    # shellcheck disable=SC2086 # a list of numbers
    kill -STOP $now 2>/dev/null || true
    seen=$now
  done
  printf '%s\n' "$seen"
}

thaw_tree() {
  # shellcheck disable=SC2046 # a list of numbers
  kill -CONT $(tree "$1") 2>/dev/null || true
}

# SIGKILLs every process of an entry with its children, and waits for the end.
kill_entry() {
  local entry=$1 pid victims=''
  for pid in $(live_pids "$entry"); do
    victims+=" $(freeze_tree "$pid")"
  done
  # shellcheck disable=SC2086 # a list of numbers
  [[ -z $victims ]] || kill -KILL $victims 2>/dev/null || true
  for pid in $victims; do
    wait_gone "$pid" 10 || die "process $pid does not die."
  done
  rm -f "$entry/pids"
}

wait_gone() {
  local pid=$1 deadline=$((SECONDS + $2))
  while start_time "$pid" >/dev/null; do
    [[ $SECONDS -lt $deadline ]] || return 1
    sleep 0.05
  done
}

# Starts a server that outlives this script and holds nothing of its caller's:
# no terminal, no pipe (a test reads our output to its end), no lock.
launch() {
  local dir=$1
  shift
  (
    for fd in "/proc/$BASHPID/fd"/*; do
      fd=${fd##*/}
      [[ $fd -le 2 ]] || eval "exec $fd>&-"
    done
    cd "$dir"
    # cargo sets LD_LIBRARY_PATH for tests; bash ignores SIGINT in background
    # jobs, and PostgreSQL's fast shutdown is a SIGINT.
    exec env -u LD_LIBRARY_PATH --default-signal=INT,QUIT setsid "$@" \
      </dev/null >>"$dir/log" 2>&1
  ) &
  record_pid "$dir" $!
}

# --- ports --------------------------------------------------------------------

port_answers() {
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

reserved_ports() {
  local file
  for file in "$registry"/*/ports; do
    [[ ! -f $file ]] || tr '\n' ' ' <"$file"
  done
}

# Takes COUNT free ports for an instance and reserves them for as long as its
# directory exists. They lie below the range from which outgoing connections
# take theirs, so that a killed server finds its port free again.
take_ports() {
  local dir=$1 count=$2 entry port ports=() taken
  entry=$(entry_of "$dir")
  (
    flock 8
    forget_stale_entries
    taken=" $(reserved_ports) "
    while [[ ${#ports[@]} -lt $count ]]; do
      port=$((20000 + RANDOM % 12000))
      [[ $taken != *" $port "* ]] || continue
      ! port_answers "$port" || continue
      ports+=("$port")
      taken+="$port "
    done
    printf '%s\n' "${ports[*]}" >"$entry/ports"
    printf '%s\n' "${ports[*]}" >"$dir/ports"
  ) 8>"$registry/lock"
}

# The N-th port of an instance, from 1.
port() {
  local ports
  read -ra ports <"$1/ports"
  printf '%s\n' "${ports[$(($2 - 1))]}"
}

port_in_use() {
  local port
  # shellcheck disable=SC2013 # words, not lines
  for port in $(<"$1/ports"); do
    if port_answers "$port"; then
      printf '%s\n' "$port"
      return 0
    fi
  done
  return 1
}

# --- life of an instance ------------------------------------------------------

# Starts the server of KIND in DIR, for the first time or again, and returns
# when it answers. Does nothing when it is running and answers.
#
# A kind provides KIND_missing_packages, _port_count, _url, _stop_signal,
# _configure (server.conf, every time), _init (data, once), _launch, _answers
# (the server's own protocol), _finish (what needs the running server) and
# _control. bash ignores `set -e` in what is called for its success: _init,
# _answers and _finish return their failures themselves.
start_instance() {
  local kind=$1 dir=$2 entry busy
  fetch_programs "$kind"
  claim_dir "$kind" "$dir"
  entry=$(entry_of "$dir")
  if main_pid "$dir" >/dev/null && "${kind}_answers" "$dir"; then
    return 0
  fi
  kill_entry "$entry"
  if busy=$(port_in_use "$dir"); then
    [[ -z ${OWN:-} ]] || die "$dir: its port $busy is in use by another process."
    take_ports "$dir" "$("${kind}_port_count")"
  fi
  if [[ ! -f $dir/initialized ]]; then
    rm -rf "$dir/data"
    mkdir "$dir/data"
    "${kind}_configure" "$dir"
    "${kind}_init" "$dir" >>"$dir/log" 2>&1 || fail_with_log "$dir" "could not be set up"
    touch "$dir/initialized"
  fi
  "${kind}_configure" "$dir"
  [[ ! -f $dir/extra.conf ]] || cat "$dir/extra.conf" >>"$dir/server.conf"
  "${kind}_launch" "$dir"
  wait_until_answers "$kind" "$dir"
  "${kind}_finish" "$dir" >>"$dir/log" 2>&1 || fail_with_log "$dir" "could not be set up"
}

# Makes DIR an instance of KIND, or checks that it is one, and registers it.
claim_dir() {
  local kind=$1 dir=$2 entry
  mkdir -p "$dir"
  if [[ -f $dir/kind ]]; then
    [[ $(<"$dir/kind") == "$kind" ]] || die "$dir holds a server of kind $(<"$dir/kind")."
  else
    printf '%s\n' "$kind" >"$dir/kind"
  fi
  if [[ -n ${INBOXD_OWN_CONFIG:-} && -n ${OWN:-} ]]; then
    cp "$INBOXD_OWN_CONFIG" "$dir/extra.conf"
  fi
  entry=$(entry_of "$dir")
  printf '%s\n' "$state_dir" >"$entry/state"
  printf '%s\n' "${INBOXD_TEST_RUN:-}" >"$entry/run"
  if [[ ! -f $dir/ports ]]; then
    take_ports "$dir" "$("${kind}_port_count")"
  elif [[ ! -f $entry/ports ]]; then
    cp "$dir/ports" "$entry/ports"
  fi
}

wait_until_answers() {
  local kind=$1 dir=$2 deadline=$((SECONDS + start_timeout_s))
  until "${kind}_answers" "$dir"; do
    main_pid "$dir" >/dev/null || fail_with_log "$dir" "ended while starting"
    [[ $SECONDS -lt $deadline ]] || fail_with_log "$dir" "did not answer within $start_timeout_s s"
    sleep 0.1
  done
}

fail_with_log() {
  local dir=$1 what=$2
  say "$dir: $(<"$dir/kind") $what. The end of $dir/log:"
  tail -n 30 "$dir/log" | sed 's/^/    /' >&2
  kill_entry "$(entry_of "$dir")"
  exit 1
}

kill_instance() {
  kill_entry "$(entry_of "$1")"
}

# Asks the server to end, waits, and then ends its helpers.
stop_instance() {
  local dir=$1 pid kind
  kind=$(<"$dir/kind")
  if pid=$(main_pid "$dir"); then
    thaw_tree "$pid"
    kill "-$("${kind}_stop_signal")" "$pid"
    wait_gone "$pid" 60 || say "$dir: $kind did not stop within 60 s; it is killed."
  fi
  kill_instance "$dir"
}

# Ends what one test run started and left behind (its name is in
# INBOXD_TEST_RUN), by name: a test should end its own.
reap_run() {
  [[ -n ${1:-} ]] || die "usage: scripts/services reap RUN"
  local entry
  for entry in "$registry"/*/; do
    entry=${entry%/}
    [[ -f $entry/run && $(<"$entry/run") == "$1" ]] || continue
    [[ -n $(live_pids "$entry") ]] || continue
    say "left running by a test, now ended: $(<"$entry/dir")"
    kill_entry "$entry"
  done
}
