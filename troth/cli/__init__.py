"""The `troth` command: `main` runs it; `troth.cli.app` says what all commands share."""

from __future__ import annotations

import logging
import os
import sys

from protocol.errors import ConfigError, Fault, Ignore, Reject
from troth.cli import calibrate, env, node, replay, roles, smollm, tasks
from troth.cli.app import app, set_overrides, split_overrides

__all__ = ["app", "calibrate", "env", "main", "node", "replay", "roles", "smollm", "split_overrides", "tasks"]


def main() -> None:
    """Entry point: turn the four kinds of error into messages and exit codes."""
    logging.basicConfig(
        level=os.environ.get("TROTH_LOG", "WARNING").upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        rest, overrides = split_overrides(sys.argv[1:])
        set_overrides(overrides)
        app(args=rest, prog_name="troth")
    except ConfigError as error:
        print(f"troth: {error}", file=sys.stderr)
        sys.exit(2)
    except Reject as error:
        print(f"troth: rejected: {error}", file=sys.stderr)
        sys.exit(3)
    except (Fault, Ignore) as error:
        print(f"troth: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our stdout went away (for example `| head`): nothing is wrong with us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        # A full disk, a missing permission: the machine's, not ours. What matters is on disk before it is acted on.
        where = f"{error.filename}: " if error.filename else ""
        print(f"troth: {where}{error.strerror or error}; mend that and start again", file=sys.stderr)
        sys.exit(1)
