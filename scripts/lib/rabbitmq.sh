# shellcheck shell=bash
# RabbitMQ: user `guest`, no plugins, everything on loopback.
#
# Erlang's port mapper (epmd) is normally one per machine and shared; here each
# instance has its own, so that ending one instance never touches another.

rabbitmq_server_command() {
  # Debian's command in the path switches to the user rabbitmq, which cannot
  # enter our directories.
  if [[ -x /usr/lib/rabbitmq/bin/$1 ]]; then
    printf '%s\n' "/usr/lib/rabbitmq/bin/$1"
  else
    command -v "$1"
  fi
}

rabbitmq_missing_packages() {
  rabbitmq_server_command rabbitmq-server >/dev/null || printf 'rabbitmq-server\n'
}

rabbitmq_port_count() { printf '3\n'; }

rabbitmq_url() { printf 'amqp://guest:guest@127.0.0.1:%s/%%2f\n' "$(port "$1" 1)"; }

rabbitmq_stop_signal() { printf 'TERM\n'; }

rabbitmq_configure() {
  local dir=$1
  mkdir -p "$dir/home"
  printf '[].\n' >"$dir/advanced.config"
  printf '[].\n' >"$dir/enabled_plugins"
  cat >"$dir/server.conf" <<CONF
listeners.tcp.loopback = 127.0.0.1:$(port "$dir" 1)
log.dir = $dir
log.file = log
log.file.level = info
log.connection.level = warning
raft.wal_max_size_bytes = 67108864
CONF
}

rabbitmq_init() { :; }

# The node's environment, for the server and for rabbitmqctl, and nothing of the
# machine's own RabbitMQ.
rabbitmq_environment() {
  local dir=$1
  printf '%s\n' \
    HOME="$dir/home" \
    RABBITMQ_NODENAME=inboxd@localhost \
    RABBITMQ_MNESIA_BASE="$dir/data" \
    RABBITMQ_LOG_BASE="$dir" \
    RABBITMQ_CONFIG_FILE="$dir/server.conf" \
    RABBITMQ_ADVANCED_CONFIG_FILE="$dir/advanced.config" \
    RABBITMQ_CONF_ENV_FILE=/dev/null \
    RABBITMQ_ENABLED_PLUGINS_FILE="$dir/enabled_plugins" \
    RABBITMQ_DIST_PORT="$(port "$dir" 2)" \
    ERL_EPMD_PORT="$(port "$dir" 3)" \
    ERL_EPMD_ADDRESS=127.0.0.1
}

rabbitmq_launch() {
  local dir=$1 environment
  mapfile -t environment < <(rabbitmq_environment "$dir")
  # Started by systemd is what we say to get Erlang itself as the process, not
  # a shell around it.
  environment+=(
    RUNNING_UNDER_SYSTEMD=true
    "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false"
  )
  rabbitmq_launch_epmd "$dir"
  launch "$dir" env -u NOTIFY_SOCKET "${environment[@]}" "$(rabbitmq_server_command rabbitmq-server)"
  rabbitmq_record_server_first "$dir"
}

rabbitmq_launch_epmd() {
  local dir=$1 epmd_port deadline=$((SECONDS + 10))
  epmd_port=$(port "$dir" 3)
  launch "$dir" epmd -port "$epmd_port" -address 127.0.0.1
  until port_answers "$epmd_port"; do
    [[ $SECONDS -lt $deadline ]] || fail_with_log "$dir" "has no port mapper (epmd)"
    sleep 0.02
  done
}

# epmd has to be up before the server, but the server is the main process.
rabbitmq_record_server_first() {
  local pids
  pids=$(entry_of "$1")/pids
  printf '%s\n' "$(tac "$pids")" >"$pids"
}

# A whole AMQP handshake, sent in one go: a connection to the virtual host opens
# only when the node has started. No client tool of Debian's does this.
rabbitmq_answers() (
  exec 2>/dev/null
  exec 3<>"/dev/tcp/127.0.0.1/$(port "$1" 1)" || exit 1
  {
    printf 'AMQP\x00\x00\x09\x01'
    # connection.start-ok: PLAIN, guest, guest
    printf '\x01\x00\x00\x00\x00\x00\x24\x00\x0a\x00\x0b\x00\x00\x00\x00\x05PLAIN'
    printf '\x00\x00\x00\x0c\x00guest\x00guest\x05en_US\xce'
    # connection.tune-ok, connection.open of /, connection.close
    printf '\x01\x00\x00\x00\x00\x00\x0c\x00\x0a\x00\x1f\x07\xff\x00\x02\x00\x00\x00\x00\xce'
    printf '\x01\x00\x00\x00\x00\x00\x08\x00\x0a\x00\x28\x01/\x00\x00\xce'
    printf '\x01\x00\x00\x00\x00\x00\x0b\x00\x0a\x00\x32\x00\xc8\x00\x00\x00\x00\x00\xce'
  } >&3
  # connection.start, connection.tune, connection.open-ok
  [[ $(rabbitmq_method) == 000a000a && $(rabbitmq_method) == 000a001e && $(rabbitmq_method) == 000a0029 ]]
)

# Class and method of the next frame on descriptor 3.
rabbitmq_method() {
  local frame size
  frame=$(rabbitmq_read 7)
  [[ ${#frame} -eq 14 ]] || return 1
  size=$((16#${frame:6:8}))
  frame=$(rabbitmq_read $((size + 1)))
  printf '%s\n' "${frame:0:8}"
}

rabbitmq_read() {
  timeout 5 head -c "$1" <&3 | od -An -v -tx1 | tr -d ' \n'
}

rabbitmq_finish() { :; }

rabbitmq_control() {
  local dir=$1 environment
  shift
  mapfile -t environment < <(rabbitmq_environment "$dir")
  env "${environment[@]}" "$(rabbitmq_server_command rabbitmqctl)" -q "$@"
}
