"""`python -m colossal_lite` is the command `colossal-lite`."""

from colossal_lite.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
