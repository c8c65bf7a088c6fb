#!/bin/sh
# Starts the Redis of compose.yaml: its users are those of users.acl, with the hashes of the passwords in the environment.
# A file that `diloco acl` made (REDIS_ACL in compose/lan.yaml) has its hashes already, and is taken as it is.
# Users of other servers (failover.acl) come with MORE_USERS. Arguments are more options of the server.
set -eu

users=/data/users.acl
umask 077

# How it follows another one is in a file, not on its command line, which everybody can read. Whom it follows at first is
# REPLICA_OF (address, port). After that it is what sentinels have had it write there: nobody, if it has become primary.
following=
if [ -n "${REDIS_REPLICA_PASSWORD:-}" ]; then
  following=/data/following.conf
  role=${REPLICA_OF:+replicaof $REPLICA_OF}
  [ ! -f "$following" ] || role=$(grep '^replicaof ' "$following" || true)
  {
    echo "protected-mode no"
    echo "masteruser replica"
    echo "masterauth $REDIS_REPLICA_PASSWORD"
    # A replica may fall behind by payloads: one that is cut off for it has to take all again.
    echo "client-output-buffer-limit replica 0 0 0"
    echo "repl-backlog-size 256mb"
    echo "$role"
  } > "$following.new"
  mv "$following.new" "$following"
fi

sed '/^#/d' /etc/diloco/users.acl ${MORE_USERS:-} > "$users.new"
for variable in $(grep -o '{REDIS_[A-Z0-9_]*}' "$users.new" | tr -d '{}' | sort -u); do
  eval "password=\${$variable:-}"
  if [ -z "$password" ]; then
    echo "$variable is empty: set it to a password for this Redis user" >&2
    exit 1
  fi
  hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
  sed -i "s/{$variable}/$hash/" "$users.new"
  unset "$variable"
done

mv "$users.new" "$users"

# Every write is on disk within a second; nothing is ever evicted; no value is larger than the largest of ours.
exec docker-entrypoint.sh redis-server $following --appendonly yes --save '' --maxmemory-policy noeviction \
  --proto-max-bulk-len 64mb --aclfile "$users" "$@"
