# shellcheck shell=bash
# MariaDB: user `root` without a password, database `inboxd`.

mariadb_missing_packages() {
  local command
  for command in mariadbd mariadb mariadb-install-db; do
    command -v "$command" >/dev/null || printf 'mariadb-server\n'
  done
}

mariadb_port_count() { printf '1\n'; }

mariadb_url() { printf 'mysql://root@127.0.0.1:%s/inboxd\n' "$(port "$1" 1)"; }

mariadb_stop_signal() { printf 'TERM\n'; }

# The socket's path is relative to the data directory: a socket's full path is
# limited to some hundred bytes, and checkouts lie deeper. A server that starts
# removes the temporary tables of all others that use the same tmpdir.
mariadb_configure() {
  mkdir -p "$1/tmp"
  cat >"$1/server.conf" <<CONF
[mariadbd]
user = $(id -un)
datadir = $1/data
tmpdir = $1/tmp
port = $(port "$1" 1)
bind-address = 127.0.0.1
socket = mariadb.sock
pid-file = mariadb.pid
skip-name-resolve
max_connections = 300
max_allowed_packet = 64M
character-set-server = utf8mb4
innodb_log_file_size = 32M
CONF
}

mariadb_init() {
  mariadb-install-db --defaults-file="$1/server.conf" \
    --auth-root-authentication-method=normal --skip-test-db --skip-name-resolve
}

mariadb_launch() {
  launch "$1" mariadbd --defaults-file="$1/server.conf"
}

mariadb_query() {
  local dir=$1
  shift
  mariadb --no-defaults --protocol=tcp -h 127.0.0.1 -P "$(port "$dir" 1)" -u root --connect-timeout=2 "$@"
}

mariadb_answers() {
  mariadb_query "$1" -e 'select 1' >/dev/null 2>&1
}

mariadb_finish() {
  mariadb_query "$1" -e 'create database if not exists inboxd'
}

mariadb_control() {
  local dir=$1
  shift
  mariadb_query "$dir" -D inboxd "$@"
}
