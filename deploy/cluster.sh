#!/bin/sh
# Makes a Redis Cluster of the SERVERS (address:port, with spaces between them), a replica for each primary, unless they
# are one already. Ends when all slots are served, and half of the servers follow another one.
set -eu

ask() { # of the first server that answers
  for server in $SERVERS; do
    redis-cli -h "${server%:*}" -p "${server#*:}" --user setup --no-auth-warning "$@" 2> /dev/null && return
  done
}

if ask cluster info | grep -q '^cluster_known_nodes:1[^0-9]*$'; then
  # shellcheck disable=SC2086 # several words
  redis-cli --user setup --no-auth-warning --cluster create $SERVERS --cluster-replicas 1 --cluster-yes
fi
# shellcheck disable=SC2086
set -- $SERVERS
waited=0
until ask cluster info | grep -q '^cluster_state:ok' && [ "$(ask cluster nodes | grep -c slave)" -ge $(($# / 2)) ]; do
  sleep 1
  waited=$((waited + 1))
  if [ $((waited % 30)) -eq 0 ]; then
    echo "not whole after $waited s: $(ask cluster info | tr -d '\r' | grep -E '^cluster_(state|slots_ok|known_nodes):' | tr '\n' ' ')" >&2
    echo "should its making have been interrupted, empty its volumes: docker compose down --volumes" >&2
  fi
done
