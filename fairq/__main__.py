"""`python -m fairq` is `fairq`."""

from fairq.cli import main

if __name__ == "__main__":
    main(prog_name="fairq")
