# shellcheck shell=bash
# Apache Kafka: one KRaft node that is broker and controller.

: "${kafka_home:?}" "${kafka_version:?}"

kafka_missing_packages() {
  command -v java >/dev/null || printf 'default-jre-headless\n'
  command -v kcat >/dev/null || printf 'kcat\n'
  [[ -d $kafka_home/libs ]] || command -v mvn >/dev/null || printf 'maven\n'
}

kafka_port_count() { printf '2\n'; }

kafka_url() { printf '127.0.0.1:%s\n' "$(port "$1" 1)"; }

kafka_stop_signal() { printf 'TERM\n'; }

# Small files, and timeouts that let tests use sessions of 2 s and more. The
# groups of the new protocol take their session timeout from the broker.
kafka_configure() {
  local dir=$1 broker controller
  broker=127.0.0.1:$(port "$dir" 1)
  controller=127.0.0.1:$(port "$dir" 2)
  cat >"$dir/server.conf" <<CONF
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@$controller
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://$broker,CONTROLLER://$controller
advertised.listeners=PLAINTEXT://$broker
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=$dir/data
auto.create.topics.enable=false
default.replication.factor=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=2000
group.consumer.min.session.timeout.ms=2000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=1500
log.segment.bytes=67108864
log.index.size.max.bytes=1048576
log.cleaner.dedupe.buffer.size=4194304
CONF
  # A killed broker may come back only when its old session has run out. Nobody
  # kills the shared one, and a short session costs it leadership under load.
  if [[ -n ${OWN:-} ]]; then
    cat >>"$dir/server.conf" <<CONF
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
CONF
  fi
  kafka_logging >"$dir/log4j2.properties"
}

kafka_logging() {
  cat <<'CONF'
rootLogger.level = INFO
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %m (%c)%n
logger.config.name = org.apache.kafka.common.config.AbstractConfig
logger.config.level = WARN
CONF
}

kafka_java() {
  printf '%s\n' java "$@" -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp "$kafka_home/libs/*"
}

kafka_init() {
  local dir=$1 java id
  mapfile -t java < <(kafka_java -Xmx256m)
  # 16 bytes in base64url; the A keeps a leading dash from looking like a flag.
  id=A$(head -c 18 /dev/urandom | base64 | tr '+/' '-_' | cut -c 1-20)A
  "${java[@]}" kafka.tools.StorageTool format -t "$id" -c "$dir/server.conf"
}

kafka_launch() {
  local dir=$1 java
  mapfile -t java < <(kafka_java -Xms256m -Xmx512m "-Dlog4j2.configurationFile=$dir/log4j2.properties")
  launch "$dir" "${java[@]}" kafka.Kafka "$dir/server.conf"
}

# Metadata that names a broker: the port is open long before.
kafka_answers() {
  local metadata
  metadata=$(timeout 3 kcat -b "$(kafka_url "$1")" -L -m 2 2>/dev/null) || return 1
  [[ $metadata == *' 1 brokers:'* ]]
}

kafka_finish() { :; }

kafka_control() {
  local dir=$1
  shift
  kcat -b "$(kafka_url "$dir")" "$@"
}
