"""A worker's log. Besides its text, each line has an `action`, its name for programs, and facts."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

logger: Final = logging.getLogger("fairq.worker")


def at(level: int, action: str, text: str, *args: object, exc_info: Any = None, **facts: Any) -> None:
    logger.log(level, text, *args, exc_info=exc_info, extra={"action": action, **facts}, stacklevel=2)


debug, info = partial(at, logging.DEBUG), partial(at, logging.INFO)
warning, error = partial(at, logging.WARNING), partial(at, logging.ERROR)
