"""Keep a harness's event stream short: a sandbox keeps only so much output, and the ending comes last."""

_DROP = """\
{ { { "$@"; echo $? >&3; } | grep --line-buffered -av -e '%s' >&4; } 3>&1 | { read code; exit "$code"; }; } 4>&1"""
"""Standard output goes through grep; the exit code is the program's (plain POSIX sh has no pipefail)."""


def without(events: tuple[str, ...], argv: tuple[str, ...]) -> tuple[str, ...]:
    """``argv`` run so that lines of its standard output matching one of ``events`` (grep patterns) are dropped.

    Standard input, standard error and the exit code stay those of the program.
    """
    return ("/bin/sh", "-c", _DROP % "' -e '".join(events), "harness", *argv)
