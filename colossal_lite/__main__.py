"""`python -m colossal_lite` is the command `colossal-lite`."""

from colossal_lite.launcher.command import main

if __name__ == "__main__":
    raise SystemExit(main())
