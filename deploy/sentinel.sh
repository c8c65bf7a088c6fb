#!/bin/sh
# Starts a sentinel of compose/sentinel.yaml. What it has found out about the servers is kept in /data, as they are then.
# It tells everybody who is primary; only the other sentinels, with a password of theirs, agree with it on another one.
set -eu

config=/data/sentinel.conf
umask 077
{
  echo "user default on nopass resetchannels -@all +ping +info +sentinel|master +sentinel|replicas"
  echo "user sentinel on >$REDIS_SENTINEL_PASSWORD allchannels +@all"
  echo "sentinel sentinel-pass $REDIS_SENTINEL_PASSWORD"
  if [ -f "$config" ]; then
    grep -vE '^user |^sentinel (sentinel|auth)-pass ' "$config" # a password may be another one by now
  else
    echo "dir /data"
    echo "sentinel sentinel-user sentinel"
    echo "sentinel monitor diloco $PRIMARY 6379 2"
    echo "sentinel auth-user diloco sentinel"
    echo "sentinel down-after-milliseconds diloco 5000"
    echo "sentinel failover-timeout diloco 20000"
    echo "sentinel parallel-syncs diloco 2"
  fi
  echo "sentinel auth-pass diloco $REDIS_SENTINEL_PASSWORD"
} > "$config.new"
mv "$config.new" "$config"
exec docker-entrypoint.sh redis-server "$config" --sentinel
