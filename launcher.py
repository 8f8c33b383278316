"""``python launcher.py --conf FILE --backbone NAME``, as the first documents type it: the command `astuner`."""

from astuner.cli import main

if __name__ == "__main__":
    main()
