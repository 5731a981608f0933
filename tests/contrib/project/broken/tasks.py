"""An app whose tasks cannot be imported; only a test installs it."""

import nothing_of_that_name  # noqa: F401
