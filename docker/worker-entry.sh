#!/bin/sh
# Entry point of the worker image: reads the invitation and starts the worker.
#
#   GRIDTRAIN_INVITATION_FILE=/invitations/local   a file: docker/compose.yaml
#   GRIDTRAIN_INVITATION=gridtrain1:...            the text itself: docker/compose.volunteer.yaml
#   neither                                        the arguments, such as --help, are passed to gridtrain
#
# The invitation never appears on a command line, which every user of the machine can read.
#
#   GRIDTRAIN_ACCEPT=sha256:...                    run the coordinator's bundle if it has this digest
#   GRIDTRAIN_ACCEPT_FILE=/invitations/digest      the same, with the digest in a file
#   the single argument `look`                     show the bundle and its digest without running it
#   none of these                                  the arguments are the training command
set -eu

if [ -z "${GRIDTRAIN_ACCEPT:-}" ] && [ -n "${GRIDTRAIN_ACCEPT_FILE:-}" ]; then
    GRIDTRAIN_ACCEPT=$(cat "$GRIDTRAIN_ACCEPT_FILE")
    export GRIDTRAIN_ACCEPT
fi
unset GRIDTRAIN_ACCEPT_FILE
if [ -n "${GRIDTRAIN_INVITATION_FILE:-}" ]; then
    from=@$GRIDTRAIN_INVITATION_FILE
elif [ -n "${GRIDTRAIN_INVITATION:-}" ]; then
    from=-
else
    exec gridtrain "$@"
fi
invitation=${GRIDTRAIN_INVITATION:-}
unset GRIDTRAIN_INVITATION_FILE GRIDTRAIN_INVITATION

if [ "$*" = look ]; then
    set -- worker "$from" --dry-run
elif [ -n "${GRIDTRAIN_ACCEPT:-}" ]; then
    set -- worker "$from"
else
    set -- worker "$from" -- "$@"
fi
[ "$from" = - ] || exec gridtrain "$@"
exec gridtrain "$@" <<END
$invitation
END
