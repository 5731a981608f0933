"""An app whose tasks cannot be imported; no project has it but a test's."""

import nothing_of_that_name  # noqa: F401
