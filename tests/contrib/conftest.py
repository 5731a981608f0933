"""The tests of the project are run by Django, not by pytest."""

collect_ignore = ["project"]
