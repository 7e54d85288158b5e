"""`python -m kvsnap`."""

from kvsnap.cli import main

if __name__ == "__main__":
    main()
