# shellcheck shell=bash
# PostgreSQL: trusts everybody on loopback, user `postgres`, database `inboxd`.

# Debian keeps the server out of the path, one directory per version.
postgres_bin() {
  local dir
  for dir in /usr/lib/postgresql/15/bin /usr/lib/postgresql/*/bin; do
    if [[ -x $dir/postgres ]]; then
      printf '%s\n' "$dir"
      return 0
    fi
  done
  dir=$(command -v postgres) || return 1
  dirname "$dir"
}

postgres_missing_packages() {
  postgres_bin >/dev/null && command -v psql >/dev/null || printf 'postgresql\n'
  # Tests put one of their own before the server. Debian keeps it off a user's path.
  command -v pgbouncer >/dev/null || [[ -x /usr/sbin/pgbouncer ]] || printf 'pgbouncer\n'
}

postgres_port_count() { printf '1\n'; }

postgres_url() { printf 'postgres://postgres@127.0.0.1:%s/inboxd\n' "$(port "$1" 1)"; }

# SIGINT is the fast shutdown: open connections are cut, data is flushed.
postgres_stop_signal() { printf 'INT\n'; }

# PostgreSQL refuses to run as root. The user it runs as gets root's way through
# directories, because a checkout or a test's temporary directory is often
# closed to everybody else.
postgres_user_command() {
  if [[ $EUID -eq 0 ]]; then
    printf '%s\n' setpriv --reuid=postgres --regid=postgres --init-groups \
      --inh-caps=+dac_override --ambient-caps=+dac_override
  else
    printf 'env\n'
  fi
}

postgres_configure() {
  cat >"$1/server.conf" <<CONF
port = $(port "$1" 1)
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 300
CONF
  # The kill of a process loses nothing that it wrote, synced or not; recovery
  # that syncs every file first takes seconds.
  if [[ -n ${OWN:-} ]]; then
    printf 'fsync = off\n' >>"$1/server.conf"
  fi
}

postgres_init() {
  local dir=$1 as
  mapfile -t as < <(postgres_user_command)
  if [[ $EUID -eq 0 ]]; then
    chown postgres: "$dir/data" || return
  fi
  "${as[@]}" "$(postgres_bin)/initdb" -D "$dir/data" -U postgres \
    --auth=trust --locale=C.UTF-8 --no-sync || return
  printf "include = '../server.conf'\n" >>"$dir/data/postgresql.conf"
}

postgres_launch() {
  local dir=$1 as
  mapfile -t as < <(postgres_user_command)
  # Of a server that was killed: PostgreSQL takes its zombie for a running one.
  rm -f "$dir/data/postmaster.pid"
  launch "$dir" "${as[@]}" "$(postgres_bin)/postgres" -D "$dir/data"
}

postgres_query() {
  local dir=$1 database=$2
  shift 2
  PGCONNECT_TIMEOUT=2 psql -qXAt -h 127.0.0.1 -p "$(port "$dir" 1)" -U postgres -d "$database" "$@"
}

postgres_answers() {
  [[ $(postgres_query "$1" postgres -c 'select 1' 2>/dev/null) == 1 ]]
}

postgres_finish() {
  local dir=$1
  if [[ -z $(postgres_query "$dir" postgres -c "select 1 from pg_database where datname = 'inboxd'") ]]; then
    postgres_query "$dir" postgres -c 'create database inboxd'
  fi
}

postgres_control() {
  local dir=$1
  shift
  postgres_query "$dir" inboxd "$@"
}
