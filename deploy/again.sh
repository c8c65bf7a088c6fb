#!/bin/sh
# Runs a command again and again: until it ends with 0, as a learner does once its run is finished, or with 2, as one
# that was refused. For machines without a scheduler (docs/howto/second-machine.md):
#
#   setsid deploy/again.sh .venv/bin/diloco learner --state-dir state > learner.log 2>&1 < /dev/null &
#
# SIGTERM to this script has the command end in order, and it stays down.
set -u
AFTER_S=${AFTER_S:-10}
ending=
trap 'ending=1; kill -TERM "$child" 2> /dev/null' TERM INT HUP
while :; do
  "$@" &
  child=$!
  wait "$child"; status=$?
  while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done # a signal interrupts `wait`
  case "$ending:$status" in 1:* | :0 | :2) exit "$status" ;; esac
  echo "ended with status $status: again in $AFTER_S s" >&2
  sleep "$AFTER_S" &
  child=$!
  wait "$child"
  [ -z "$ending" ] || exit 75
done
