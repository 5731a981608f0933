"""A command that needs a library which is not installed."""

import no_such_library  # type: ignore[import-not-found]

plot = no_such_library.plot
