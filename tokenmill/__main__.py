"""`python -m tokenmill`: the same as `tokenmill`."""

from tokenmill.entry import main

if __name__ == "__main__":
    main()
