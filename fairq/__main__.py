"""`fairq`, and `python -m fairq`."""

import io
import sys


def main() -> None:
    try:
        from fairq.cli import main as command_line
    except ModuleNotFoundError as exc:
        if exc.name != "click":
            raise
        sys.exit("fairq: the command line is not installed\n  pip install 'fairq[cli]'")
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal has no letter for is shown escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    command_line(prog_name="fairq")


if __name__ == "__main__":
    main()
