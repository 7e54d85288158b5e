"""The command `kvsnap`, and `python -m kvsnap`."""

import sys

try:
    from kvsnap.cli import main  # takes half a second, in which Ctrl-C may come
except KeyboardInterrupt:
    sys.stderr.write("kvsnap: interrupted\n")
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    main()
